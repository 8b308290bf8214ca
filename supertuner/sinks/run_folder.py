"""The run folder: the configuration file and the effective settings, all decisions with their reasons, all events.

    run.json               identifies the folder: format, name, digest of the configuration, time of the first start
    config.given.*         the configuration file, byte for byte but for tokens of the hub, and the files that it
                           refers to
    config.resolved.json   every setting with its value, and the origin of each value
    decisions.json         every decision made at run time: what, value, reason
    set_aside.jsonl        every file that is not used, with the reason
    events.jsonl           all events, in order
    .lock                  held with flock by the process that uses the run; the kernel releases it when that exits

Once a run has results, its folder belongs to its configuration: another configuration is refused. So is a folder with
files that are not from a run. Refused folders are not changed.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from supertuner.core import durable
from supertuner.core.errors import RunFolderError
from supertuner.core.events import DecisionEvent, Event, SetAsideEvent
from supertuner.core.types import JSON
from supertuner.sinks.jsonlines import (
    JsonLinesFile,
    encode_line,
    event_record,
    now_text,
    read_records,
    readable_time,
    record_problem,
)
from supertuner.sinks.saved_config import CONFIG_FILE_STEM, SavedConfig

RUN_FORMAT = 1
RUN_FILE = "run.json"
RESOLVED_CONFIG_FILE = "config.resolved.json"
DECISIONS_FILE = "decisions.json"
SET_ASIDE_FILE = "set_aside.jsonl"
EVENTS_FILE = "events.jsonl"
LOCK_FILE = ".lock"
RESULT_FOLDERS = ("checkpoints", "samples", "exports")
"""Folders with results of a run."""
MAX_DIFFERENCES_SHOWN = 5


class RunFolder:
    """A run folder, locked until `close`. It is a sink that stores decisions, set-aside files and events."""

    def __init__(self, path: Path, name: str, config: SavedConfig) -> None:
        self.path = path
        self.replaced_settings: tuple[str, ...] = ()
        """The differences from the settings of an earlier start without results, which these settings replaced."""
        self.changed_settings: tuple[str, ...] = ()
        """The settings that changed since the last session of this run; none of them affects what is trained."""
        self.damaged_records: tuple[str, ...] = ()
        """Damaged files of records, with the problem and their new names. The run continues without these records."""
        _refuse_foreign_folder(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"{path} cannot be created: {error.strerror}"
            raise RunFolderError(f"{problem}; choose another run.output_dir") from error
        self._lock_handle = _acquire_lock(path)
        try:
            _refuse_foreign_folder(path)
            _refuse_linked_folders(path)
            self._begin_run(name, config)
            self._decisions = self._load_records(DECISIONS_FILE, read_decisions)
            self._set_aside_keys = set(map(_set_aside_key, self._load_records(SET_ASIDE_FILE, read_set_aside)))
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
        """Store several events. `decisions.json` is written once, durably, and only if there is a new decision."""
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
        """Remove the set-aside files of this dataset from earlier sessions, because it will be scanned again."""
        with self._emit_lock:
            other_records = [line for line in read_set_aside(self.path / SET_ASIDE_FILE) if line["dataset"] != dataset]
            self._set_aside_file.close()
            durable.write_bytes(self.path / SET_ASIDE_FILE, b"".join(map(encode_line, other_records)))
            self._set_aside_keys = {_set_aside_key(line) for line in other_records}
            self._set_aside_file = JsonLinesFile(self.path / SET_ASIDE_FILE)

    def close(self) -> None:
        """Release the folder; its files stay."""
        try:
            with self._events_file, self._set_aside_file:
                pass
        finally:
            os.close(self._lock_handle)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            self.close()
        except OSError as refusal:
            if kind is None:
                raise _write_error(self.path, refusal) from refusal
            # Otherwise the original error is raised, not the failure to sync the records.

    def _load_records(self, name: str, read: Callable[[Path], list[dict[str, JSON]]]) -> list[dict[str, JSON]]:
        """The records of a file. A damaged file is renamed: it must not cost the run its checkpoints."""
        file, number = self.path / name, 1
        try:
            return read(file)
        except RunFolderError as error:
            if not os.path.lexists(file):
                self.damaged_records += (f"{file} is missing",)
                return []
            while os.path.lexists(aside := self.path / f"{name}.damaged-{number}"):
                number += 1
            os.rename(file, aside)
            self.damaged_records += (f"{error}; it is renamed to {aside.name}",)
            return []

    def _begin_run(self, name: str, config: SavedConfig) -> None:
        """Write the files of a new run; run.json comes last, because without it the folder is not a run."""
        for entry in self.path.iterdir():
            if _is_temporary(entry.name):
                entry.unlink()
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
                entry.unlink()  # a file of the replaced configuration

    def _continue_run(self, config: SavedConfig) -> None:
        """Continue a run. Changeable settings may differ; the folder stores their newest values."""
        before = read_run_object(self.path / RESOLVED_CONFIG_FILE).get("config")
        self.changed_settings = tuple(config.all_differences(before)) if isinstance(before, Mapping) else ()
        if self.changed_settings:
            durable.write_json(self.path / RESOLVED_CONFIG_FILE, {"config": config.resolved, "origins": config.origins})

    def _add_decision(self, event: DecisionEvent) -> bool:
        """Add a decision unless it equals the last one of its name. Returns whether it was added."""
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
    """The process that uses the folder, `process 4711 since …`; None if no process does."""
    lock = path / LOCK_FILE
    if not lock.exists():
        return None
    handle = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return lock.read_text().strip() or "another process"
    finally:
        os.close(handle)
    return None


def _acquire_lock(path: Path) -> int:
    """Lock the folder for this process and return the handle. The kernel releases the lock when the process exits."""
    try:
        handle = durable.open_plain_file(path / LOCK_FILE, os.O_RDWR)
    except OSError as error:
        raise _write_error(path, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = (path / LOCK_FILE).read_text().strip() or "another process"
        os.close(handle)
        raise RunFolderError(f"{path} is in use by {holder}; wait for it, stop it, or set another run.name") from error
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} since {readable_time(now_text())}\n".encode(), 0)
    except OSError as error:
        os.close(handle)
        raise _write_error(path, error) from error
    return handle


def _write_error(path: Path, error: OSError) -> RunFolderError:
    where = error.filename or path
    remedy = "remove it" if error.errno == errno.ELOOP else "free space, or choose another run.output_dir"
    return RunFolderError(f"{where} cannot be written: {error.strerror}; {remedy}")


def _refuse_linked_folders(path: Path) -> None:
    """RunFolderError if a folder of the run, or one inside it, is a link: what the run writes would be elsewhere."""
    for entry in (
        *path.iterdir(),
        *(inner for folder in path.iterdir() if folder.is_dir() for inner in folder.iterdir()),
    ):
        if entry.is_symlink() and entry.is_dir():
            problem = f"{entry} is a link to another folder, and links are not followed for writing"
            raise RunFolderError(f"{problem}; replace it by the folder, or move the whole run with run.output_dir")


def _refuse_foreign_folder(path: Path) -> None:
    """Raise RunFolderError if the folder has files that are not from a run."""
    try:
        names = sorted(os.listdir(path))
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        if not path.exists():  # a parent is a file: the folder cannot be created
            return
        raise RunFolderError(f"{path} is a file; choose another run.output_dir or run.name") from error
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}"
        raise RunFolderError(f"{problem}; check its owner and permissions, or choose another run.output_dir") from error
    ours = {RUN_FILE, RESOLVED_CONFIG_FILE, DECISIONS_FILE, SET_ASIDE_FILE, EVENTS_FILE, LOCK_FILE}
    foreign = [n for n in names if n not in ours and not n.startswith(f"{CONFIG_FILE_STEM}.") and not _is_temporary(n)]
    if RUN_FILE not in names and foreign:
        some = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
        problem = f"{path} contains files that are not from a run ({some})"
        raise RunFolderError(f"{problem}; choose another run.output_dir or run.name")


def _require_same_run(path: Path, config: SavedConfig) -> tuple[str, ...]:
    """The differences from the settings of the run in this folder. Raises RunFolderError if that run has results."""
    run = read_run_object(path / RUN_FILE)
    if run.get("format") != RUN_FORMAT:
        problem = f"{path / RUN_FILE} has format {run.get('format')}, this version reads {RUN_FORMAT}"
        raise RunFolderError(f"{problem}; use another run.name")
    if run.get("config_digest") == config.digest:
        return ()
    saved_config = read_run_object(path / RESOLVED_CONFIG_FILE).get("config")
    lines = config.identity_differences(saved_config if isinstance(saved_config, Mapping) else {})
    if not lines:  # the digest of an earlier version covered other settings
        return ()
    if not _has_results(path):
        return tuple(lines)
    shown = [f"  {line}" for line in lines[:MAX_DIFFERENCES_SHOWN]]
    if len(lines) > MAX_DIFFERENCES_SHOWN:
        shown.append(f"  and {len(lines) - MAX_DIFFERENCES_SHOWN} more")
    first = f"{path} belongs to another run, begun {readable_time(str(run.get('begun')))}; its settings differ:"
    last = f"set another run.name{_resume_hint(path)}, or move that folder away"
    raise RunFolderError("\n".join([first, *shown, last]))


def _resume_hint(path: Path) -> str:
    """How to resume from the newest checkpoint of this run in another run; "" without a checkpoint."""
    newest = max((path / "checkpoints").glob("step-*"), default=None)
    return "" if newest is None else f" (with checkpoints.resume={newest} it resumes from there)"


def _has_results(path: Path) -> bool:
    """Whether the run has losses, checkpoints, samples or exports."""
    losses = path / "losses.jsonl"
    if losses.is_file() and losses.stat().st_size:
        return True
    return any((path / name).is_dir() and any((path / name).iterdir()) for name in RESULT_FOLDERS)


def _is_temporary(name: str) -> bool:
    """Whether it is a temporary file of core.durable; such files remain only after a kill."""
    return name.startswith(".") and name.endswith(".tmp")


def read_run_object(path: Path) -> dict[str, JSON]:
    """A JSON object in a run folder. Raises RunFolderError if it is not readable."""
    value: dict[str, JSON] = _read_json(path, dict)
    return value


def read_decisions(path: Path) -> list[dict[str, JSON]]:
    """The records of decisions.json. Raises RunFolderError if it is damaged."""
    value: list[dict[str, JSON]] = _read_json(path, list)
    for number, record in enumerate(value):
        if problem := record_problem(record, ("what", "value", "reason")):
            raise RunFolderError(f"{path}: entry {number} {problem}")
    return value


def read_set_aside(path: Path) -> list[dict[str, JSON]]:
    """The records of set_aside.jsonl. Raises RunFolderError if it is damaged."""
    return list(read_records(path, ("dataset", "file", "reason")))


def _read_json(path: Path, kind: type) -> Any:
    remedy = "the run folder is damaged: move it away and start again"
    if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
        raise RunFolderError(f"{path} is not a plain file; {remedy}")
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"{path} cannot be read ({error}); {remedy}") from error
    if not isinstance(value, kind):
        raise RunFolderError(f"{path} is not a JSON {'object' if kind is dict else 'list'}; {remedy}")
    return value


def _set_aside_key(record: Mapping[str, JSON]) -> tuple[JSON, JSON, JSON]:
    return record["dataset"], record["file"], record["reason"]
