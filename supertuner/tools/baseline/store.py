"""A baseline's folder: whole or not there, with a version and a checksum that are looked at when it is read.

baseline.json         what was measured, where, by which code, with which settings; not the steps
steps.jsonl           each step of each repeat: its times, its loss
config.json           the settings that were given, with whole paths: what `check` runs again
baseline_report.md    the same for people
diagnostics.json      what `supertuner doctor` finds on this machine, without trying its memory
events.jsonl          what the first repeat said
nvidia_smi.log        GPUs, second by second, where there is an nvidia-smi
trace.json.gz         torch's profiler over some steps, where it was asked for
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
from supertuner.tools.baseline.record import STEPS_FILE, MeasuredJob, job_to_json, parse_job, read_steps, step_lines

BASELINE_FILE: Final = "baseline.json"
CONFIG_FILE: Final = "config.json"
REPORT_FILE: Final = "baseline_report.md"
RATIOS_FILE: Final = "ratios.json"
"""In the folder instead of all of that: a baseline that carries over between machines (ratios.py)."""
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
    """The repeats that were measured."""
    cold_start_s: float | None
    """From the command to the first step where data had to be staged and encoded; None: everything was there."""
    machine: Mapping[str, JSON]
    commit: str | None
    config: Mapping[str, Any]
    """The settings that were given."""
    resolved: Mapping[str, Any]
    """Every setting."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that decide how fast a step is."""
    notes: tuple[str, ...] = ()

    @property
    def precision(self) -> str:
        return str(self.resolved["train"]["mixed_precision"])


def baseline_path(folder: Path, name: str) -> Path:
    if not NAME_PATTERN.fullmatch(name):
        raise OptionError(f"{name!r} is no name of a baseline: letters, digits and . _ - please")
    return folder / name


def require_writable(folder: Path) -> None:
    """Before anything is measured: it takes long, and would be lost."""
    absolute = folder.absolute()
    existing = next(path for path in (absolute, *absolute.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise OptionError(f"--dir {folder}: {existing} is no folder that can be written to; give another one")


def new_baseline_path(folder: Path, name: str, replace: bool) -> Path:
    """Where a baseline will lie. One that is there is not written over unless that was said."""
    path = baseline_path(folder, name)
    require_writable(folder)
    if path.exists():
        if not (path / BASELINE_FILE).is_file():
            raise OptionError(f"{path} is there and is no baseline; give another name")
        if not replace:
            raise OptionError(f"{path} is captured already; --replace captures it anew")
    return path


def save_baseline(path: Path, baseline: Baseline, report: str, extras: Mapping[str, Path]) -> None:
    """All files in a folder beside, then one rename. `extras` are files by the name they get."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as temporary:
        new_folder = Path(temporary) / path.name
        new_folder.mkdir()
        steps = b"".join(step_lines(job.steps, repeat=at) for at, job in enumerate(baseline.jobs, start=1))
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
    if document.get("steps_digest") != _digest(content):
        raise BaselineError(f"{path / STEPS_FILE} is not what was written; capture it again")
    try:
        by_repeat: dict[int, list[bytes]] = {}
        for line in content.splitlines():
            by_repeat.setdefault(int(json.loads(line)["repeat"]), []).append(line)
        jobs = tuple(
            parse_job(rest, read_steps(b"\n".join(by_repeat[at]), str(path / STEPS_FILE)), str(path / BASELINE_FILE))
            for at, rest in enumerate(document["jobs"], start=1)
        )
        known = {name: document[name] for name in Baseline.__slots__ if name in document}
        _require_field_types(document)
        return Baseline(**{**known, "name": path.name, "jobs": jobs, "notes": tuple(document["notes"])})
    except (KeyError, TypeError, ValueError) as error:
        raise BaselineError(f"{path / BASELINE_FILE} lacks something ({error}); capture it again") from error


def require_config_file(path: Path) -> Path:
    """The settings that `check` runs again."""
    file = path / CONFIG_FILE
    try:
        is_object = isinstance(json.loads(file.read_bytes()), dict)
    except (OSError, ValueError) as error:
        raise BaselineError(f"{file} cannot be read ({error}); {CONFIG_REMEDY}") from error
    if not is_object:
        raise BaselineError(f"{file} holds no settings; {CONFIG_REMEDY}")
    return file


def baseline_names(folder: Path) -> list[str]:
    """Those that are there."""
    return sorted(found.parent.name for found in folder.glob(f"*/{BASELINE_FILE}"))


def find_baseline(folder: Path, name: str) -> Path:
    """The baseline of a name, or at a path."""
    for path in (folder / name, Path(name)):
        if (path / BASELINE_FILE).exists():
            return path
    if (folder / name / RATIOS_FILE).is_file():
        raise OptionError(f"{folder / name} holds ratios against a peer: give CONFIG and --peer SCRIPT")
    existing = baseline_names(folder)
    known = f"there {'is' if len(existing) == 1 else 'are'} {', '.join(existing)}" if existing else "there is none"
    capture = f"`supertuner baseline capture {name} CONFIG` makes one"
    raise BaselineError(f"{folder / name} is no baseline; {known} in {folder}. {capture}")


def _document(baseline: Baseline, steps: bytes) -> dict[str, JSON]:
    fields: dict[str, Any] = {name: getattr(baseline, name) for name in Baseline.__slots__ if name != "jobs"}
    body = {**fields, "steps_digest": _digest(steps), "jobs": [job_to_json(job) for job in baseline.jobs]}
    return {"format": FORMAT, "version": VERSION, "digest": _digest(_canonical(body)), **body}


def _read_document(path: Path) -> dict[str, Any]:
    file = path / BASELINE_FILE
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise BaselineError(f"{file} cannot be read ({error}); capture it again") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise BaselineError(f"{file} is no baseline of ours; capture it again")
    if document.get("version") != VERSION:
        raise BaselineError(
            f"{file} has version {document.get('version')}, this program reads {VERSION}; capture it again"
        )
    body = {name: value for name, value in document.items() if name not in ("format", "version", "digest")}
    if document.get("digest") != _digest(_canonical(body)):
        raise BaselineError(f"{file} is not what was written: its checksum is another; capture it again")
    return body


def _require_field_types(document: Mapping[str, Any]) -> None:
    """A checksum says that nobody changed it since, not that who wrote it wrote what we read."""
    for name, kind in FIELD_TYPES.items():
        if not isinstance(document[name], kind) or not document[name]:
            raise ValueError(f"{name} is {document[name]!r}")
    if "mixed_precision" not in document["resolved"]["train"]:
        raise KeyError("resolved.train.mixed_precision")


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, ensure_ascii=True).encode()


def _digest(content: bytes) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(content)
