"""Append-only files with one JSON object per line; an incomplete last line, after a kill, is detected and left out."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from supertuner.core.closing import CloseOnExit
from supertuner.core.durable import open_plain_file
from supertuner.core.errors import RunFolderError
from supertuner.core.events import DecisionEvent, Event, MeasurementEvent, NoteEvent, SetAsideEvent, WarningEvent
from supertuner.core.types import JSON

EVENT_NAMES: Mapping[type[Event], str] = {
    DecisionEvent: "decided",
    WarningEvent: "warned",
    NoteEvent: "noted",
    SetAsideEvent: "set_aside",
    MeasurementEvent: "measured",
}


class JsonLinesFile(CloseOnExit):
    """A file of records, to which several threads may append.

    A record is written as a whole line by one write(), so a line without a newline was cut off by a kill or a full
    disk: opening the file removes such a line, and reading stops before it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = open_plain_file(path, os.O_RDWR | os.O_APPEND)
        _truncate_incomplete_line(self._handle)

    def append(self, record: Mapping[str, JSON]) -> None:
        remaining = memoryview(encode_line(record))
        try:
            while remaining:  # a disk that becomes full takes a part of the line, and the next call raises
                remaining = remaining[os.write(self._handle, remaining) :]
        except OSError as error:
            problem = f"{self.path} cannot be written: {error.strerror}"
            raise RunFolderError(f"{problem}; free space and start again") from error

    def emit(self, event: Event, /) -> None:
        self.append(event_record(event))

    def close(self) -> None:
        try:
            os.fsync(self._handle)
        finally:
            os.close(self._handle)


def encode_line(record: Mapping[str, JSON]) -> bytes:
    """One line of the file. Surrogates, from file names that are not UTF-8, are written as JSON escapes."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode(errors="backslashreplace")


def event_record(event: Event) -> dict[str, JSON]:
    """The record of an event: its time, its kind and its fields."""
    return {"at": now_text(), "event": EVENT_NAMES[type(event)], **dataclasses.asdict(event)}


def read_records(path: Path, keys: Iterable[str] = ()) -> Iterator[dict[str, JSON]]:
    """The complete records of the file, in order; none if there is no file. Raises RunFolderError if it cannot be read,
    and at a line that is not a JSON object with these keys."""
    if not path.exists():
        return
    if not path.is_file():  # opening a pipe would wait for its writer
        raise RunFolderError(f"{path} cannot be read: it is not a plain file; remove it")
    with _explain_read_errors(path), path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RunFolderError(f"{path}, line {number} is not JSON ({error}); remove that line") from error
            if problem := record_problem(record, keys):
                raise RunFolderError(f"{path}, line {number} {problem}; remove that line")
            yield record


@contextmanager
def _explain_read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror}; check its owner and permissions") from error


def record_problem(record: object, keys: Iterable[str]) -> str:
    """Why this is not a JSON object with these keys; "" if it is one."""
    if not isinstance(record, dict):
        return "is not a JSON object"
    missing = [key for key in keys if key not in record]
    return f"has no {missing[0]!r}" if missing else ""


def now_text() -> str:
    """The current time in UTC, to the second, as run folders store it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def readable_time(moment: str) -> str:
    """A stored time for people: `2026-01-31 09:30:00 UTC`."""
    return moment.replace("T", " ").replace("+00:00", " UTC")


def _truncate_incomplete_line(handle: int) -> None:
    """Truncate the file after its last complete line."""
    end, newline = os.fstat(handle).st_size, -1
    while end > 0 and newline < 0:
        begin = max(0, end - (1 << 16))
        newline = os.pread(handle, end - begin, begin).rfind(b"\n")
        end = begin + newline + 1 if newline >= 0 else begin
    os.ftruncate(handle, end)
