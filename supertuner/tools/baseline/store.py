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
from supertuner.tools.baseline.record import STEPS, Job, job_json, job_of, read_steps, step_lines

BASELINE: Final = "baseline.json"
CONFIG: Final = "config.json"
REPORT: Final = "baseline_report.md"
RATIOS: Final = "ratios.json"
"""In the folder instead of all of that: a baseline that carries over between machines (ratios.py)."""
FORMAT: Final = "supertuner baseline"
VERSION: Final = 1
OTHER_CONFIG: Final = "capture it again, or give `check` another CONFIG"
KINDS: Final = {"jobs": list, "captured_at": str, "steps": int, "machine": dict, "config": dict, "resolved": dict}
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class Baseline:
    name: str
    captured_at: str
    steps: int
    """Optimizer steps of each repeat."""
    jobs: tuple[Job, ...]
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


def named(folder: Path, name: str) -> Path:
    if not NAME.fullmatch(name):
        raise OptionError(f"{name!r} is no name of a baseline: letters, digits and . _ - please")
    return folder / name


def require_writable(folder: Path) -> None:
    """Before anything is measured: it takes long, and would be lost."""
    whole = folder.absolute()
    there = next(path for path in (whole, *whole.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise OptionError(f"--dir {folder}: {there} is no folder that can be written to; give another one")


def place_for(folder: Path, name: str, replace: bool) -> Path:
    """Where a baseline will lie. One that is there is not written over unless that was said."""
    path = named(folder, name)
    require_writable(folder)
    if path.exists():
        if not (path / BASELINE).is_file():
            raise OptionError(f"{path} is there and is no baseline; give another name")
        if not replace:
            raise OptionError(f"{path} is captured already; --replace captures it anew")
    return path


def save(path: Path, baseline: Baseline, report: str, extras: Mapping[str, Path]) -> None:
    """All files in a folder beside, then one rename. `extras` are files by the name they get."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as making:
        made = Path(making) / path.name
        made.mkdir()
        steps = b"".join(step_lines(job.steps, repeat=at) for at, job in enumerate(baseline.jobs, start=1))
        durable.write_bytes(made / STEPS, steps)
        durable.write_json(made / BASELINE, _document(baseline, steps))
        durable.write_json(made / CONFIG, baseline.config)
        durable.write_text(made / REPORT, report)
        for name, file in extras.items():
            shutil.copyfile(file, made / name)
        if path.exists():
            os.replace(path, Path(making) / "before")
        os.replace(made, path)
        durable.sync_folder(path.parent)


def load(path: Path) -> Baseline:
    document = _read(path)
    try:
        content = (path / STEPS).read_bytes()
    except OSError as error:
        raise BaselineError(f"{path / STEPS} cannot be read: {error.strerror}; capture it again") from error
    if document.get("steps_digest") != _digest(content):
        raise BaselineError(f"{path / STEPS} is not what was written; capture it again")
    try:
        by_repeat: dict[int, list[bytes]] = {}
        for line in content.splitlines():
            by_repeat.setdefault(int(json.loads(line)["repeat"]), []).append(line)
        jobs = tuple(
            job_of(rest, read_steps(b"\n".join(by_repeat[at]), str(path / STEPS)), str(path / BASELINE))
            for at, rest in enumerate(document["jobs"], start=1)
        )
        known = {name: document[name] for name in Baseline.__slots__ if name in document}
        _require_kinds(document)
        return Baseline(**{**known, "name": path.name, "jobs": jobs, "notes": tuple(document["notes"])})
    except (KeyError, TypeError, ValueError) as error:
        raise BaselineError(f"{path / BASELINE} lacks something ({error}); capture it again") from error


def require_config(path: Path) -> Path:
    """The settings that `check` runs again."""
    file = path / CONFIG
    try:
        whole = isinstance(json.loads(file.read_bytes()), dict)
    except (OSError, ValueError) as error:
        raise BaselineError(f"{file} cannot be read ({error}); {OTHER_CONFIG}") from error
    if not whole:
        raise BaselineError(f"{file} holds no settings; {OTHER_CONFIG}")
    return file


def names(folder: Path) -> list[str]:
    """Those that are there."""
    return sorted(found.parent.name for found in folder.glob(f"*/{BASELINE}"))


def find(folder: Path, name: str) -> Path:
    """The baseline of a name, or at a path."""
    for path in (folder / name, Path(name)):
        if (path / BASELINE).exists():
            return path
    if (folder / name / RATIOS).is_file():
        raise OptionError(f"{folder / name} holds ratios against a peer: give CONFIG and --peer SCRIPT")
    there = names(folder)
    known = f"there {'is' if len(there) == 1 else 'are'} {', '.join(there)}" if there else "there is none"
    capture = f"`supertuner baseline capture {name} CONFIG` makes one"
    raise BaselineError(f"{folder / name} is no baseline; {known} in {folder}. {capture}")


def _document(baseline: Baseline, steps: bytes) -> dict[str, JSON]:
    fields: dict[str, Any] = {name: getattr(baseline, name) for name in Baseline.__slots__ if name != "jobs"}
    body = {**fields, "steps_digest": _digest(steps), "jobs": [job_json(job) for job in baseline.jobs]}
    return {"format": FORMAT, "version": VERSION, "digest": _digest(_canonical(body)), **body}


def _read(path: Path) -> dict[str, Any]:
    file = path / BASELINE
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise BaselineError(f"{file} cannot be read ({error}); capture it again") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise BaselineError(f"{file} is no baseline of ours; capture it again")
    if found.get("version") != VERSION:
        raise BaselineError(
            f"{file} has version {found.get('version')}, this program reads {VERSION}; capture it again"
        )
    body = {name: value for name, value in found.items() if name not in ("format", "version", "digest")}
    if found.get("digest") != _digest(_canonical(body)):
        raise BaselineError(f"{file} is not what was written: its checksum is another; capture it again")
    return body


def _require_kinds(document: Mapping[str, Any]) -> None:
    """A checksum says that nobody changed it since, not that who wrote it wrote what we read."""
    for name, kind in KINDS.items():
        if not isinstance(document[name], kind) or not document[name]:
            raise ValueError(f"{name} is {document[name]!r}")
    if "mixed_precision" not in document["resolved"]["train"]:
        raise KeyError("resolved.train.mixed_precision")


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, ensure_ascii=True).encode()


def _digest(content: bytes) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(content)
