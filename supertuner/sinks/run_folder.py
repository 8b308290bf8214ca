"""A run's folder: the configuration as given and as resolved, every decision with its reason, every event.

    run.json               what this folder is: format, name, digest of the configuration, when it was begun
    config.given.*         the configuration file, byte for byte, and the files that it named
    config.resolved.json   every setting with its value, and where each came from
    decisions.json         every decision made at run time: what, value, reason
    set_aside.jsonl        every file that is not used, and why
    events.jsonl           everything that was said, in order
    .lock                  held by flock while the run is in use; it dies with its owner

A folder belongs to one configuration once something came of it. Another one, or files that are not a run's, are refused
and left as they are.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType

from supertuner.core import durable
from supertuner.core.errors import RunFolderError
from supertuner.core.events import Decided, Event, SetAside
from supertuner.core.types import JSON
from supertuner.sinks.jsonlines import JsonLines, event_record, line_bytes, now_text, people_time, read_lines
from supertuner.sinks.kept_config import GIVEN, KeptConfig

FORMAT = 1
RUN = "run.json"
RESOLVED = "config.resolved.json"
DECISIONS = "decisions.json"
SET_ASIDE = "set_aside.jsonl"
EVENTS = "events.jsonl"
LOCK = ".lock"
RESULTS = ("checkpoints", "samples", "exports")
"""Folders of a run that hold what came of it."""
DIFFERENCES_SHOWN = 5


class RunFolder:
    """One run's folder, locked from here to `close`. It is a sink: decisions, set-aside files and events are kept."""

    def __init__(self, path: Path, name: str, config: KeptConfig) -> None:
        self.path = path
        self.replaced: tuple[str, ...] = ()
        """How the settings differ from those of an earlier start of which nothing came, if there was one."""
        self.changed: tuple[str, ...] = ()
        """Settings of an earlier session of this run that are others now; none that decides what is trained."""
        _refuse_foreign(path)
        _make(path)
        self._lock = _lock(path)
        try:
            _refuse_foreign(path)
            self._begin(name, config)
            self._decisions = _read_list(path / DECISIONS)
            self._set_aside = {_set_aside_key(line) for line in read_lines(path / SET_ASIDE)}
            self._set_aside_lines = JsonLines(path / SET_ASIDE)
            self._events = JsonLines(path / EVENTS)
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, OSError):
                raise _refused(path, error) from error
            raise
        self._guard = threading.Lock()

    def emit(self, event: Event, /) -> None:
        self.emit_all((event,))

    def emit_all(self, events: Iterable[Event]) -> None:
        """Keep several events; `decisions.json` is written once, durably, and only if something new was decided."""
        with self._guard:
            fresh = False
            for event in events:
                self._events.emit(event)
                if isinstance(event, Decided):
                    fresh |= self._remember(event)
                elif isinstance(event, SetAside):
                    self._set_one_aside(event)
            if fresh:
                durable.write_json(self.path / DECISIONS, self._decisions)

    def forget_set_aside(self, dataset: str) -> None:
        """Drop what earlier sessions set aside of this dataset: it is about to be looked through again."""
        with self._guard:
            kept = [line for line in read_lines(self.path / SET_ASIDE) if line["dataset"] != dataset]
            self._set_aside_lines.close()
            durable.write_bytes(self.path / SET_ASIDE, b"".join(map(line_bytes, kept)))
            self._set_aside = {_set_aside_key(line) for line in kept}
            self._set_aside_lines = JsonLines(self.path / SET_ASIDE)

    def close(self) -> None:
        """Let go of the folder; what it holds stays."""
        try:
            with closing(self._events), closing(self._set_aside_lines):
                pass
        finally:
            os.close(self._lock)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OSError as refusal:
            if error is None:
                raise _refused(self.path, refusal) from refusal
            # What ends the run is told; that its record could not be synced either is no news beside it.

    def _begin(self, name: str, config: KeptConfig) -> None:
        """Write who this folder belongs to, last of all: without run.json it is not a run yet."""
        _sweep_temporaries(self.path)
        run = self.path / RUN
        if run.exists():
            self.replaced = _differences(self.path, config)
            if not self.replaced:
                self._go_on(config)
                return
        for file, content in config.files().items():
            durable.write_bytes(self.path / file, content)
        durable.write_json(self.path / DECISIONS, [])
        durable.write_json(self.path / RESOLVED, {"config": config.resolved, "origins": config.origins})
        facts = {"config_file": next(iter(config.files())), "config_digest": config.digest}
        durable.write_json(run, {"format": FORMAT, "name": name, "begun": now_text(), **facts})
        for entry in self.path.iterdir():
            if entry.name.startswith(f"{GIVEN}.") and entry.name not in config.files():
                entry.unlink()  # of the settings that were replaced

    def _go_on(self, config: KeptConfig) -> None:
        """The same run with, perhaps, other settings of those that may change: the folder keeps the newest."""
        before = _read_object(self.path / RESOLVED).get("config")
        self.changed = tuple(config.changes(before)) if isinstance(before, Mapping) else ()
        if self.changed:
            durable.write_json(self.path / RESOLVED, {"config": config.resolved, "origins": config.origins})

    def _remember(self, event: Decided) -> bool:
        """A decision that repeats the last one of its name is not kept twice."""
        last = next((d for d in reversed(self._decisions) if d["what"] == event.what), None)
        if last is not None and (last["value"], last["reason"]) == (event.value, event.reason):
            return False
        record = event_record(event)
        del record["event"]
        self._decisions.append(record)
        return True

    def _set_one_aside(self, event: SetAside) -> None:
        record = dataclasses.asdict(event)
        if _set_aside_key(record) not in self._set_aside:
            self._set_aside.add(_set_aside_key(record))
            self._set_aside_lines.append(record)


def holder_of(path: Path) -> str | None:
    """Who uses the folder now: `process 4711 since …`; None if nobody does."""
    lock = path / LOCK
    if not lock.exists():
        return None
    handle = os.open(lock, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return lock.read_text().strip() or "another process"
    finally:
        os.close(handle)
    return None


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be made: {error.strerror}; choose another run.output_dir") from error


def _lock(path: Path) -> int:
    """Take the folder for this process. The kernel lets go of it when the process ends, however it ends."""
    try:
        handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _refused(path, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = (path / LOCK).read_text().strip() or "another process"
        os.close(handle)
        raise RunFolderError(
            f"{path} is in use by {holder}; wait for it, end it, or give this run another run.name"
        ) from error
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} since {people_time(now_text())}\n".encode(), 0)
    except OSError as error:
        os.close(handle)
        raise _refused(path, error) from error
    return handle


def _refused(path: Path, error: OSError) -> RunFolderError:
    where = error.filename or path
    return RunFolderError(f"{where} cannot be written: {error.strerror}; make room, or choose another run.output_dir")


def _refuse_foreign(path: Path) -> None:
    """A folder with files in it that is not a run's is somebody's; nothing is added to it."""
    if not path.exists():
        return
    if not path.is_dir():
        raise RunFolderError(f"{path} is a file; choose another run.output_dir or run.name")
    names = sorted(entry.name for entry in path.iterdir())
    ours = {RUN, RESOLVED, DECISIONS, SET_ASIDE, EVENTS, LOCK}
    foreign = [n for n in names if n not in ours and not n.startswith(f"{GIVEN}.") and not _is_temporary(n)]
    if RUN not in names and foreign:
        some = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
        raise RunFolderError(
            f"{path} holds files that are not a run's ({some}); choose another run.output_dir or run.name"
        )


def _differences(path: Path, config: KeptConfig) -> tuple[str, ...]:
    """How the settings differ from those that the folder was begun with. Refused, if anything came of those."""
    run = _read_object(path / RUN)
    if run.get("format") != FORMAT:
        raise RunFolderError(
            f"{path / RUN} has format {run.get('format')}, this version reads {FORMAT}; use another run.name"
        )
    if run.get("config_digest") == config.digest:
        return ()
    kept = _read_object(path / RESOLVED).get("config")
    lines = config.differences(kept if isinstance(kept, Mapping) else {})
    if not lines:  # an earlier version counted other settings
        return ()
    if not _has_results(path):
        return tuple(lines)
    shown = [f"  {line}" for line in lines[:DIFFERENCES_SHOWN]]
    if len(lines) > DIFFERENCES_SHOWN:
        shown.append(f"  and {len(lines) - DIFFERENCES_SHOWN} more")
    raise RunFolderError(
        "\n".join(
            [
                f"{path} holds another run, begun {people_time(str(run.get('begun')))}; its settings differ:",
                *shown,
                f"give this run another run.name{_from_there(path)}, or move that folder away",
            ]
        )
    )


def _from_there(path: Path) -> str:
    """How another run goes on where this one is, if it got as far as a checkpoint."""
    newest = max((path / "checkpoints").glob("step-*"), default=None)
    return "" if newest is None else f" (with --resume {newest} it goes on from there)"


def _has_results(path: Path) -> bool:
    """Whether the run got as far as a result: a start that was refused leaves none."""
    losses = path / "losses.jsonl"
    if losses.is_file() and losses.stat().st_size:
        return True
    return any((path / name).is_dir() and any((path / name).iterdir()) for name in RESULTS)


def _is_temporary(name: str) -> bool:
    """A name that core.durable gives while it writes; left behind only by a kill."""
    return name.startswith(".") and name.endswith(".tmp")


def _sweep_temporaries(path: Path) -> None:
    for entry in path.iterdir():
        if _is_temporary(entry.name):
            entry.unlink()


def _read_object(path: Path) -> Mapping[str, JSON]:
    value = _read_json(path)
    if not isinstance(value, dict):
        raise RunFolderError(f"{path} is not a JSON object; move the run's folder away and start again")
    return value


def _read_list(path: Path) -> list[dict[str, JSON]]:
    value = _read_json(path)
    if not isinstance(value, list):
        raise RunFolderError(f"{path} is not a JSON list; move the run's folder away and start again")
    return value


def _read_json(path: Path) -> JSON:
    try:
        value: JSON = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read ({error}); move the run's folder away and start again") from error
    return value


def _set_aside_key(record: Mapping[str, JSON]) -> tuple[JSON, JSON, JSON]:
    return record["dataset"], record["file"], record["reason"]
