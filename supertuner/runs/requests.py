"""What other processes ask of a running job, as files in the run's folder; served between two windows.

    requests/<id>.json            asked: {"kind": "validate"}; written whole, removed once it is answered
    requests/answers/<id>.json    {"status": "done", "message": …, "path": …}; removed by who asked
    requests/refused/             what was no request

Whatever lies in that folder, looking at it never ends a run.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias, get_args

from supertuner.core import durable
from supertuner.core.errors import RunFolderError
from supertuner.core.events import Silence, Sink, Warned
from supertuner.core.types import JSON, on_screen

FOLDER = "requests"
ANSWERS = "answers"
REFUSED = "refused"
NAME = re.compile(r"([a-z0-9][a-z0-9-]{0,63})\.json")
MOST_BYTES = 1 << 16
MOST_AT_ONCE = 64
"""Requests looked at between two windows; the others wait for the next."""

Kind: TypeAlias = Literal["validate", "checkpoint"]
Status: TypeAlias = Literal["done", "error", "ended"]


@dataclass(frozen=True, slots=True)
class Request:
    id: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Answer:
    status: Status
    message: str
    """For people."""
    path: str | None = None
    """Where the result is."""


class Requests:
    """The job's side. Leaving its `with` tells everybody who still waits that the run has ended."""

    def __init__(self, run: Path, sink: Sink | None = None) -> None:
        self._folder = run / FOLDER
        self._sink = sink or Silence()
        self._ignored: frozenset[str] = frozenset((ANSWERS, REFUSED))
        try:
            for folder in (self._folder, self._folder / ANSWERS, self._folder / REFUSED):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"{error.filename} cannot be made: {error.strerror}; move it away") from error
        self._drop_old_answers()

    def pending(self) -> list[Request]:
        """What is asked for now, in order of the files' names. Costs one listing of a folder that is nearly empty."""
        try:
            names = os.listdir(self._folder)
        except OSError as error:
            self._warn_once("", f"cannot be listed: {error.strerror}; requests to this run are not seen")
            return []
        if len(names) <= len(self._ignored) and self._ignored.issuperset(names):
            return []
        asked = sorted(name for name in names if name not in self._ignored and not name.startswith("."))
        looked = [self._look(name) for name in asked[:MOST_AT_ONCE]]
        return [request for request in looked if request is not None]

    def take(self, request: Request) -> None:
        """It will be answered later, perhaps by another thread: `pending` names it no more."""
        self._ignored |= {f"{request.id}.json"}

    def answer(self, request: Request, result: str, path: Path | None = None) -> None:
        """It was done: `result` is told to who asked, and `path` says where it is."""
        self._reply(request.id, Answer("done", result, None if path is None else str(path)))

    def refuse(self, request: Request, why: str) -> None:
        """It could not be done."""
        self._reply(request.id, Answer("error", why))

    def close(self) -> None:
        for request in self.pending():
            self._reply(request.id, Answer("ended", "the run ended before it could do this"))

    def __enter__(self) -> Requests:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _look(self, name: str) -> Request | None:
        match = NAME.fullmatch(name)
        try:
            if match is None:
                raise ValueError("it is not named like a request")
            return Request(match[1], _kind(read_object(self._folder / name)))
        except FileNotFoundError:
            return None  # withdrawn by who asked
        except (OSError, ValueError) as error:
            if match is not None:
                self._write_answer(match[1], Answer("error", f"this is no request: {error}"))
            self._set_aside(name, f"is no request: {error}")
            return None

    def _reply(self, asked: str, answer: Answer) -> None:
        self._write_answer(asked, answer)
        try:
            (self._folder / f"{asked}.json").unlink(missing_ok=True)
        except OSError as error:
            self._warn_once(f"{asked}.json", f"was served, and cannot be removed: {error.strerror}")

    def _write_answer(self, asked: str, answer: Answer) -> None:
        """An answer that cannot be written is told to the run's own log: no request is worth a run."""
        try:
            fields = {"status": answer.status, "message": answer.message, "path": answer.path}
            durable.write_json(self._folder / ANSWERS / f"{asked}.json", fields)
        except OSError as error:
            self._sink.emit(Warned(f"request {asked}", f"cannot be answered ({answer.message}): {error.strerror}"))

    def _set_aside(self, name: str, why: str) -> None:
        try:
            os.rename(self._folder / name, self._folder / REFUSED / name)
        except OSError as error:
            self._warn_once(name, f"{why}, and cannot be moved away: {error.strerror}; it is ignored")
        else:
            self._sink.emit(Warned(f"{FOLDER}/{on_screen(name)}", f"{on_screen(why)}; moved to {REFUSED}/"))

    def _warn_once(self, name: str, message: str) -> None:
        if name not in self._ignored:
            self._ignored |= {name}
            self._sink.emit(Warned(f"{FOLDER}/{on_screen(name)}", on_screen(message)))

    def _drop_old_answers(self) -> None:
        """Answers that nobody fetched, of earlier sessions. Who waits for one has seen that the run had ended."""
        for name in _listing(self._folder / ANSWERS):
            try:
                (self._folder / ANSWERS / name).unlink()
            except OSError as error:
                self._sink.emit(Warned(f"{FOLDER}/{ANSWERS}/{on_screen(name)}", f"cannot be removed: {error.strerror}"))


def read_object(path: Path) -> Mapping[str, JSON]:
    """A small JSON object from a plain file; OSError or ValueError if it is anything else."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is not a file")
        content = os.read(fd, MOST_BYTES + 1)
    finally:
        os.close(fd)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it is longer than {MOST_BYTES} bytes")
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _kind(value: Mapping[str, JSON]) -> Kind:
    for known in get_args(Kind):
        if value.get("kind") == known:
            kind: Kind = known
            return kind
    shown = repr(value.get("kind"))[:80]
    raise ValueError(f"its kind is {shown}; a run can be asked for {' or '.join(get_args(Kind))}")


def _listing(folder: Path) -> Iterable[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return ()  # told by `pending`, which sees the same
