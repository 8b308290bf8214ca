"""Events as one JSON object per line, only ever appended; what a kill tore off is recognised and left out."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

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


class JsonLinesFile:
    """A file of records that can be appended to by several threads at once.

    A record is written by one write() of a whole line, so a line without its end is one that a kill or a full disk
    tore: opening the file again cuts such a tail off, and reading it stops before the tail.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        _cut_torn_tail(self._handle)

    def append(self, record: Mapping[str, JSON]) -> None:
        remaining = memoryview(encode_line(record))
        try:
            while remaining:  # a disk that fills up takes a part first, and says why at the next call
                remaining = remaining[os.write(self._handle, remaining) :]
        except OSError as error:
            raise RunFolderError(
                f"{self.path} cannot be written: {error.strerror}; make room and start again"
            ) from error

    def emit(self, event: Event, /) -> None:
        self.append(event_record(event))

    def close(self) -> None:
        try:
            os.fsync(self._handle)
        finally:
            os.close(self._handle)

    def __enter__(self) -> JsonLinesFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def encode_line(record: Mapping[str, JSON]) -> bytes:
    """One line of the file. A file name that is not UTF-8 survives as JSON's own escapes."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode(errors="backslashreplace")


def event_record(event: Event) -> dict[str, JSON]:
    """An event as it stands in the file: when, which kind, and its own fields."""
    return {"at": now_text(), "event": EVENT_NAMES[type(event)], **dataclasses.asdict(event)}


def read_records(path: Path) -> Iterator[dict[str, JSON]]:
    """Every whole record of the file, in order; a missing file has none."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise RunFolderError(f"{path}, line {number} is not JSON ({error}); remove that line") from error
            yield record


def now_text() -> str:
    """This moment in UTC, to the second, as it is written in a run's files."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def readable_time(moment: str) -> str:
    """The same moment for people: `2026-01-31 09:30:00 UTC`."""
    return moment.replace("T", " ").replace("+00:00", " UTC")


def _cut_torn_tail(handle: int) -> None:
    """Shorten the file to its last whole line."""
    end = os.fstat(handle).st_size
    step = 1 << 16
    position = end
    while position > 0:
        begin = max(0, position - step)
        newline = os.pread(handle, position - begin, begin).rfind(b"\n")
        if newline >= 0:
            os.ftruncate(handle, begin + newline + 1)
            return
        position = begin
    os.ftruncate(handle, 0)
