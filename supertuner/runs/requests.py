"""Requests of other processes to a running job, as files in the run folder; the job serves them between two windows.

    requests/<id>.json            a request, {"kind": "validate"}; written atomically, removed after the answer
    requests/answers/<id>.json    its answer, {"status": "done", "message": …, "path": …}; removed by the client
    requests/refused/             files that were not valid requests

No content of that folder can end the run.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args

from supertuner.core import durable
from supertuner.core.closing import CloseOnExit
from supertuner.core.errors import RunFolderError
from supertuner.core.events import NullSink, Sink, WarningEvent
from supertuner.core.types import JSON, escape_for_terminal

REQUESTS_FOLDER = "requests"
ANSWERS_FOLDER = "answers"
REFUSED_FOLDER = "refused"
REQUEST_FILE_NAME = re.compile(r"([a-z0-9][a-z0-9-]{0,63})\.json")
MAX_REQUEST_BYTES = 1 << 16
MAX_REQUESTS_AT_ONCE = 64
"""Requests read between two windows; the rest waits for the next window."""

RequestKind: TypeAlias = Literal["validate", "checkpoint"]
AnswerStatus: TypeAlias = Literal["done", "error", "ended"]


@dataclass(frozen=True, slots=True)
class RunRequest:
    id: str
    kind: RequestKind


@dataclass(frozen=True, slots=True)
class RequestAnswer:
    status: AnswerStatus
    message: str
    """Text for people."""
    path: str | None = None
    """Where the result was written."""


class RequestInbox(CloseOnExit):
    """The job's side. On exit it answers the remaining requests with "ended"."""

    def __init__(self, run: Path, sink: Sink | None = None) -> None:
        self._folder = run / REQUESTS_FOLDER
        self._sink = sink or NullSink()
        self._ignored_names: frozenset[str] = frozenset((ANSWERS_FOLDER, REFUSED_FOLDER))
        try:
            for folder in (self._folder, self._folder / ANSWERS_FOLDER, self._folder / REFUSED_FOLDER):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"{error.filename} cannot be created: {error.strerror}; move it away") from error
        self._drop_old_answers()

    def pending(self) -> list[RunRequest]:
        """The requests that are not answered yet, by file name. Costs one listing of a nearly empty folder."""
        try:
            names = os.listdir(self._folder)
        except OSError as error:
            self._warn_once("", f"cannot be listed: {error.strerror}; requests to this run are not served")
            return []
        if len(names) <= len(self._ignored_names) and self._ignored_names.issuperset(names):
            return []
        file_names = sorted(name for name in names if name not in self._ignored_names and not name.startswith("."))
        requests = [self._read_request(name) for name in file_names[:MAX_REQUESTS_AT_ONCE]]
        return [request for request in requests if request is not None]

    def defer(self, request: RunRequest) -> None:
        """Leave the request for a later answer, perhaps from another thread; `pending` no longer returns it."""
        self._ignored_names |= {f"{request.id}.json"}

    def answer(self, request: RunRequest, message: str, path: Path | None = None) -> None:
        """Answer that the request was fulfilled, with a text for people and the path of the result."""
        self._reply(request.id, RequestAnswer("done", message, None if path is None else str(path)))

    def refuse(self, request: RunRequest, reason: str) -> None:
        """Answer that the request could not be fulfilled."""
        self._reply(request.id, RequestAnswer("error", reason))

    def close(self) -> None:
        for request in self.pending():
            self._reply(request.id, RequestAnswer("ended", "the run ended before it could do this"))

    def _read_request(self, name: str) -> RunRequest | None:
        match = REQUEST_FILE_NAME.fullmatch(name)
        try:
            if match is None:
                raise ValueError("its name is not that of a request")
            return RunRequest(match[1], _request_kind(read_json_object(self._folder / name)))
        except FileNotFoundError:
            return None  # the client withdrew it
        except (OSError, ValueError) as error:
            if match is not None:
                self._write_answer(match[1], RequestAnswer("error", f"this is not a request: {error}"))
            self._move_to_refused(name, f"is not a request: {error}")
            return None

    def _reply(self, request_id: str, answer: RequestAnswer) -> None:
        self._write_answer(request_id, answer)
        try:
            (self._folder / f"{request_id}.json").unlink(missing_ok=True)
        except OSError as error:
            self._warn_once(f"{request_id}.json", f"was answered, but cannot be removed: {error.strerror}")

    def _write_answer(self, request_id: str, answer: RequestAnswer) -> None:
        """Write the answer. A failure is only a warning in the run's log: it must not end the run."""
        try:
            durable.write_json(self._folder / ANSWERS_FOLDER / f"{request_id}.json", asdict(answer))
        except OSError as error:
            problem = f"cannot be answered ({answer.message}): {error.strerror}"
            self._sink.emit(WarningEvent(f"request {request_id}", problem))

    def _move_to_refused(self, name: str, reason: str) -> None:
        try:
            os.rename(self._folder / name, self._folder / REFUSED_FOLDER / name)
        except OSError as error:
            self._warn_once(name, f"{reason}, and cannot be moved away: {error.strerror}; it is ignored")
        else:
            self._warn(name, f"{reason}; moved to {REFUSED_FOLDER}/")

    def _warn_once(self, name: str, message: str) -> None:
        if name not in self._ignored_names:
            self._ignored_names |= {name}
            self._warn(name, message)

    def _warn(self, name: str, message: str) -> None:
        what = f"{REQUESTS_FOLDER}/{escape_for_terminal(name)}"
        self._sink.emit(WarningEvent(what, escape_for_terminal(message)))

    def _drop_old_answers(self) -> None:
        """Remove answers of earlier sessions that no client fetched. A client that still waited saw the run end."""
        for name in _list_names(self._folder / ANSWERS_FOLDER):
            try:
                (self._folder / ANSWERS_FOLDER / name).unlink()
            except OSError as error:
                self._warn(f"{ANSWERS_FOLDER}/{name}", f"cannot be removed: {error.strerror}")


def read_json_object(path: Path) -> Mapping[str, JSON]:
    """Read a small JSON object from a regular file. Raises OSError or ValueError if it is anything else."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is not a regular file")
        content = os.read(fd, MAX_REQUEST_BYTES + 1)
    finally:
        os.close(fd)
    if len(content) > MAX_REQUEST_BYTES:
        raise ValueError(f"it is longer than {MAX_REQUEST_BYTES} bytes")
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _request_kind(value: Mapping[str, JSON]) -> RequestKind:
    if value.get("kind") in get_args(RequestKind):
        return cast(RequestKind, value["kind"])
    shown = repr(value.get("kind"))[:80]
    raise ValueError(f"its kind is {shown}; known kinds: {', '.join(get_args(RequestKind))}")


def _list_names(folder: Path) -> Iterable[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return ()  # `pending` warns about it
