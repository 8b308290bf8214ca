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
from supertuner.core.events import DecisionEvent, Event, SetAsideEvent
from supertuner.core.types import JSON
from supertuner.sinks.jsonlines import JsonLinesFile, encode_line, event_record, now_text, read_records, readable_time
from supertuner.sinks.saved_config import CONFIG_FILE_STEM, SavedConfig

RUN_FORMAT = 1
RUN_FILE = "run.json"
RESOLVED_CONFIG_FILE = "config.resolved.json"
DECISIONS_FILE = "decisions.json"
SET_ASIDE_FILE = "set_aside.jsonl"
EVENTS_FILE = "events.jsonl"
LOCK_FILE = ".lock"
RESULT_FOLDERS = ("checkpoints", "samples", "exports")
"""Folders of a run that hold what came of it."""
MAX_DIFFERENCES_SHOWN = 5


class RunFolder:
    """One run's folder, locked from here to `close`. It is a sink: decisions, set-aside files and events are kept."""

    def __init__(self, path: Path, name: str, config: SavedConfig) -> None:
        self.path = path
        self.replaced_settings: tuple[str, ...] = ()
        """How the settings differ from those of an earlier start of which nothing came, if there was one."""
        self.changed_settings: tuple[str, ...] = ()
        """Settings of an earlier session of this run that are others now; none that decides what is trained."""
        _refuse_foreign_folder(path)
        _make_folder(path)
        self._lock_handle = _acquire_lock(path)
        try:
            _refuse_foreign_folder(path)
            self._begin_run(name, config)
            self._decisions = _read_list(path / DECISIONS_FILE)
            self._set_aside_keys = {_set_aside_key(line) for line in read_records(path / SET_ASIDE_FILE)}
            self._set_aside_file = JsonLinesFile(path / SET_ASIDE_FILE)
            self._events_file = JsonLinesFile(path / EVENTS_FILE)
        except BaseException as error:
            os.close(self._lock_handle)
            if isinstance(error, OSError):
                raise _write_error(path, error) from error
            raise
        self._emit_lock = threading.Lock()

    def emit(self, event: Event, /) -> None:
        self.emit_all((event,))

    def emit_all(self, events: Iterable[Event]) -> None:
        """Keep several events; `decisions.json` is written once, durably, and only if something new was decided."""
        with self._emit_lock:
            has_new_decision = False
            for event in events:
                self._events_file.emit(event)
                if isinstance(event, DecisionEvent):
                    has_new_decision |= self._add_decision(event)
                elif isinstance(event, SetAsideEvent):
                    self._add_set_aside(event)
            if has_new_decision:
                durable.write_json(self.path / DECISIONS_FILE, self._decisions)

    def forget_set_aside(self, dataset: str) -> None:
        """Drop what earlier sessions set aside of this dataset: it is about to be looked through again."""
        with self._emit_lock:
            other_records = [line for line in read_records(self.path / SET_ASIDE_FILE) if line["dataset"] != dataset]
            self._set_aside_file.close()
            durable.write_bytes(self.path / SET_ASIDE_FILE, b"".join(map(encode_line, other_records)))
            self._set_aside_keys = {_set_aside_key(line) for line in other_records}
            self._set_aside_file = JsonLinesFile(self.path / SET_ASIDE_FILE)

    def close(self) -> None:
        """Let go of the folder; what it holds stays."""
        try:
            with closing(self._events_file), closing(self._set_aside_file):
                pass
        finally:
            os.close(self._lock_handle)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OSError as refusal:
            if error is None:
                raise _write_error(self.path, refusal) from refusal
            # What ends the run is told; that its record could not be synced either is no news beside it.

    def _begin_run(self, name: str, config: SavedConfig) -> None:
        """Write who this folder belongs to, last of all: without run.json it is not a run yet."""
        _sweep_temporaries(self.path)
        run = self.path / RUN_FILE
        if run.exists():
            self.replaced_settings = _require_same_run(self.path, config)
            if not self.replaced_settings:
                self._continue_run(config)
                return
        for file, content in config.files().items():
            durable.write_bytes(self.path / file, content)
        durable.write_json(self.path / DECISIONS_FILE, [])
        durable.write_json(self.path / RESOLVED_CONFIG_FILE, {"config": config.resolved, "origins": config.origins})
        facts = {"config_file": next(iter(config.files())), "config_digest": config.digest}
        durable.write_json(run, {"format": RUN_FORMAT, "name": name, "begun": now_text(), **facts})
        for entry in self.path.iterdir():
            if entry.name.startswith(f"{CONFIG_FILE_STEM}.") and entry.name not in config.files():
                entry.unlink()  # of the settings that were replaced

    def _continue_run(self, config: SavedConfig) -> None:
        """The same run with, perhaps, other settings of those that may change: the folder keeps the newest."""
        before = _read_object(self.path / RESOLVED_CONFIG_FILE).get("config")
        self.changed_settings = tuple(config.all_differences(before)) if isinstance(before, Mapping) else ()
        if self.changed_settings:
            durable.write_json(self.path / RESOLVED_CONFIG_FILE, {"config": config.resolved, "origins": config.origins})

    def _add_decision(self, event: DecisionEvent) -> bool:
        """A decision that repeats the last one of its name is not kept twice."""
        last = next((d for d in reversed(self._decisions) if d["what"] == event.what), None)
        if last is not None and (last["value"], last["reason"]) == (event.value, event.reason):
            return False
        record = event_record(event)
        del record["event"]
        self._decisions.append(record)
        return True

    def _add_set_aside(self, event: SetAsideEvent) -> None:
        record = dataclasses.asdict(event)
        if _set_aside_key(record) not in self._set_aside_keys:
            self._set_aside_keys.add(_set_aside_key(record))
            self._set_aside_file.append(record)


def lock_holder(path: Path) -> str | None:
    """Who uses the folder now: `process 4711 since …`; None if nobody does."""
    lock = path / LOCK_FILE
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


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be made: {error.strerror}; choose another run.output_dir") from error


def _acquire_lock(path: Path) -> int:
    """Take the folder for this process. The kernel lets go of it when the process ends, however it ends."""
    try:
        handle = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _write_error(path, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = (path / LOCK_FILE).read_text().strip() or "another process"
        os.close(handle)
        raise RunFolderError(
            f"{path} is in use by {holder}; wait for it, end it, or give this run another run.name"
        ) from error
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} since {readable_time(now_text())}\n".encode(), 0)
    except OSError as error:
        os.close(handle)
        raise _write_error(path, error) from error
    return handle


def _write_error(path: Path, error: OSError) -> RunFolderError:
    where = error.filename or path
    return RunFolderError(f"{where} cannot be written: {error.strerror}; make room, or choose another run.output_dir")


def _refuse_foreign_folder(path: Path) -> None:
    """A folder with files in it that is not a run's is somebody's; nothing is added to it."""
    if not path.exists():
        return
    if not path.is_dir():
        raise RunFolderError(f"{path} is a file; choose another run.output_dir or run.name")
    names = sorted(entry.name for entry in path.iterdir())
    ours = {RUN_FILE, RESOLVED_CONFIG_FILE, DECISIONS_FILE, SET_ASIDE_FILE, EVENTS_FILE, LOCK_FILE}
    foreign = [n for n in names if n not in ours and not n.startswith(f"{CONFIG_FILE_STEM}.") and not _is_temporary(n)]
    if RUN_FILE not in names and foreign:
        some = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
        raise RunFolderError(
            f"{path} holds files that are not a run's ({some}); choose another run.output_dir or run.name"
        )


def _require_same_run(path: Path, config: SavedConfig) -> tuple[str, ...]:
    """How the settings differ from those that the folder was begun with. Refused, if anything came of those."""
    run = _read_object(path / RUN_FILE)
    if run.get("format") != RUN_FORMAT:
        raise RunFolderError(
            f"{path / RUN_FILE} has format {run.get('format')}, this version reads {RUN_FORMAT}; use another run.name"
        )
    if run.get("config_digest") == config.digest:
        return ()
    saved_config = _read_object(path / RESOLVED_CONFIG_FILE).get("config")
    lines = config.identity_differences(saved_config if isinstance(saved_config, Mapping) else {})
    if not lines:  # an earlier version counted other settings
        return ()
    if not _has_results(path):
        return tuple(lines)
    shown = [f"  {line}" for line in lines[:MAX_DIFFERENCES_SHOWN]]
    if len(lines) > MAX_DIFFERENCES_SHOWN:
        shown.append(f"  and {len(lines) - MAX_DIFFERENCES_SHOWN} more")
    raise RunFolderError(
        "\n".join(
            [
                f"{path} holds another run, begun {readable_time(str(run.get('begun')))}; its settings differ:",
                *shown,
                f"give this run another run.name{_resume_hint(path)}, or move that folder away",
            ]
        )
    )


def _resume_hint(path: Path) -> str:
    """How another run goes on where this one is, if it got as far as a checkpoint."""
    newest = max((path / "checkpoints").glob("step-*"), default=None)
    return "" if newest is None else f" (with --resume {newest} it goes on from there)"


def _has_results(path: Path) -> bool:
    """Whether the run got as far as a result: a start that was refused leaves none."""
    losses = path / "losses.jsonl"
    if losses.is_file() and losses.stat().st_size:
        return True
    return any((path / name).is_dir() and any((path / name).iterdir()) for name in RESULT_FOLDERS)


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
