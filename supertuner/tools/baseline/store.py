"""Reads and writes the folder of a baseline. It is written atomically; version and checksums are verified on reading.

baseline.json         measured figures, machine, code and settings; without the steps
steps.jsonl           times and loss of each step of each repeat
config.json           the settings of the configuration with absolute paths: what `check` runs again
baseline_report.md    the report for people
diagnostics.json      the report of `supertuner doctor` without its allocation test
events.jsonl          the events of the first repeat
nvidia_smi.log        every GPU once per second, if nvidia-smi is installed
trace.json.gz         a trace of torch's profiler, if requested
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from supertuner.core import durable
from supertuner.core.errors import BaselineError, OptionError
from supertuner.core.types import JSON
from supertuner.tools.baseline import record
from supertuner.tools.baseline.record import STEPS_FILE, MeasuredJob, content_digest

BASELINE_FILE: Final = "baseline.json"
CONFIG_FILE: Final = "config.json"
REPORT_FILE: Final = "baseline_report.md"
RATIOS_FILE: Final = "ratios.json"
"""The only file of a baseline of ratios, which is valid across machines (peer_ratios.py)."""
STORED_FILES: Final = (BASELINE_FILE, RATIOS_FILE)
FORMAT: Final = "supertuner baseline"
VERSION: Final = 1
CONFIG_REMEDY: Final = "capture it again, or give `check` another CONFIG"
FIELD_TYPES: Final = {"jobs": list, "captured_at": str, "steps": int, "machine": dict, "config": dict, "resolved": dict}
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class Baseline:
    name: str
    captured_at: str
    steps: int
    """Optimizer steps of each repeat."""
    jobs: tuple[MeasuredJob, ...]
    """The measured repeats."""
    cold_start_s: float | None
    """Time to the first step of the preparation run if it staged or encoded data; None if nothing was missing."""
    machine: Mapping[str, JSON]
    commit: str | None
    """The git commit, with `+` for uncommitted changes; None for an installed package."""
    config: Mapping[str, Any]
    """The settings that the configuration contains."""
    resolved: Mapping[str, Any]
    """All settings, including defaults."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that affect step times."""
    notes: tuple[str, ...] = ()

    @property
    def precision(self) -> str:
        return str(self.resolved["train"]["mixed_precision"])


def baseline_path(folder: Path, name: str) -> Path:
    if not NAME_PATTERN.fullmatch(name):
        raise OptionError(f"{name!r} is not a valid name of a baseline; use letters, digits and . _ -")
    return folder / name


def require_writable(folder: Path) -> None:
    """Raise OptionError if the folder cannot be written. Called before measuring, which takes long."""
    absolute = folder.absolute()
    existing = next(path for path in (absolute, *absolute.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise OptionError(f"--dir {folder}: {existing} is not a writable folder; name another one")


def new_baseline_path(folder: Path, name: str, replace: bool) -> Path:
    """The folder of a new baseline. Raises OptionError if it exists, unless it is a baseline and `replace` is set."""
    path = baseline_path(folder, name)
    require_writable(folder)
    if path.exists():
        if not (path / BASELINE_FILE).is_file():
            raise OptionError(f"{path} exists and is not a baseline; choose another name")
        if not replace:
            raise OptionError(f"{path} exists already; give --replace to capture it again")
    return path


def save_baseline(path: Path, baseline: Baseline, report: str, extras: Mapping[str, Path]) -> None:
    """Write all files into a temporary folder, then rename it to `path`. `extras` maps file names to their sources."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as temporary:
        new_folder = Path(temporary) / path.name
        new_folder.mkdir()
        steps = b"".join(record.step_lines(job.steps, repeat=at) for at, job in enumerate(baseline.jobs, start=1))
        durable.write_bytes(new_folder / STEPS_FILE, steps)
        durable.write_json(new_folder / BASELINE_FILE, _document(baseline, steps))
        durable.write_json(new_folder / CONFIG_FILE, baseline.config)
        durable.write_text(new_folder / REPORT_FILE, report)
        for name, file in extras.items():
            shutil.copyfile(file, new_folder / name)
        if path.exists():
            os.replace(path, Path(temporary) / "before")
        os.replace(new_folder, path)
        durable.sync_folder(path.parent)


def load_baseline(path: Path) -> Baseline:
    document = _read_document(path)
    try:
        content = (path / STEPS_FILE).read_bytes()
    except OSError as error:
        raise BaselineError(f"{path / STEPS_FILE} cannot be read: {error.strerror}; capture it again") from error
    if document.get("steps_digest") != content_digest(content):
        raise BaselineError(f"{path / STEPS_FILE} has changed since it was written; capture it again")
    try:
        by_repeat: dict[int, list[bytes]] = {}
        for line in content.splitlines():
            by_repeat.setdefault(int(json.loads(line)["repeat"]), []).append(line)
        jobs = tuple(
            record.parse_job(
                rest, record.read_steps(b"\n".join(by_repeat[at]), str(path / STEPS_FILE)), str(path / BASELINE_FILE)
            )
            for at, rest in enumerate(document["jobs"], start=1)
        )
        known = {name: document[name] for name in Baseline.__slots__ if name in document}
        _require_field_types(document)
        return Baseline(**{**known, "name": path.name, "jobs": jobs, "notes": tuple(document["notes"])})
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{path / BASELINE_FILE} has a missing or wrong field ({error})"
        raise BaselineError(f"{problem}; capture it again") from error


def require_config_file(path: Path) -> Path:
    """The stored configuration, which `check` runs again. Raises BaselineError if it is not a JSON object."""
    file = path / CONFIG_FILE
    try:
        is_object = isinstance(json.loads(file.read_bytes()), dict)
    except (OSError, ValueError) as error:
        raise BaselineError(f"{file} cannot be read ({error}); {CONFIG_REMEDY}") from error
    if not is_object:
        raise BaselineError(f"{file} is not a JSON object; {CONFIG_REMEDY}")
    return file


def find_baseline(folder: Path, name: str) -> Path:
    """The folder of a baseline, by its name in `folder` or by its path. Raises an error that lists the baselines."""
    for path in (folder / name, Path(name)):
        if (path / BASELINE_FILE).exists():
            return path
        if (path / RATIOS_FILE).is_file():
            raise OptionError(f"{path} holds ratios to a peer; give CONFIG and --peer SCRIPT")
    existing, ratios = (sorted(path.parent.name for path in folder.glob(f"*/{file}")) for file in STORED_FILES)
    known = f"{folder} has {', '.join(existing) or 'none'}"
    if ratios:
        known += f", and ratios to a peer, which need CONFIG and --peer SCRIPT: {', '.join(ratios)}"
    capture = f"`supertuner baseline capture {name} CONFIG` captures one"
    raise BaselineError(f"{folder / name} is not a baseline; {known}; {capture}")


def _document(baseline: Baseline, steps: bytes) -> dict[str, JSON]:
    fields: dict[str, Any] = {name: getattr(baseline, name) for name in Baseline.__slots__ if name != "jobs"}
    body = {**fields, "steps_digest": content_digest(steps), "jobs": [record.job_to_json(job) for job in baseline.jobs]}
    return {"format": FORMAT, "version": VERSION, "digest": content_digest(_canonical(body)), **body}


def _read_document(path: Path) -> dict[str, Any]:
    file = path / BASELINE_FILE
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise BaselineError(f"{file} cannot be read ({error}); capture it again") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise BaselineError(f"{file} is not a baseline file; capture it again")
    if (version := document.get("version")) != VERSION:
        raise BaselineError(f"{file} has version {version}, this program reads {VERSION}; capture it again")
    body = {name: value for name, value in document.items() if name not in ("format", "version", "digest")}
    if document.get("digest") != content_digest(_canonical(body)):
        raise BaselineError(f"{file} has changed since it was written: its checksum is wrong; capture it again")
    return body


def _require_field_types(document: Mapping[str, Any]) -> None:
    """Raise if a field is missing or of a wrong type: a valid checksum does not guarantee the fields we expect."""
    for name, kind in FIELD_TYPES.items():
        if not isinstance(document[name], kind) or not document[name]:
            raise ValueError(f"{name} is {document[name]!r}")
    if "mixed_precision" not in document["resolved"]["train"]:
        raise KeyError("resolved.train.mixed_precision")


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, ensure_ascii=True).encode()
