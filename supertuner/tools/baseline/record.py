"""The record of one measured job: time and loss of each step, start-up times, peak memory; as data and as JSON.

The process that trained writes it, and the process that judges reads it; the two may be different versions of this
program. Later versions may add fields; a reader ignores fields that it does not know.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from supertuner.core.durable import write_bytes, write_json
from supertuner.core.errors import BaselineError
from supertuner.core.types import JSON

STEPS_FILE: Final = "steps.jsonl"
JOB_FILE: Final = "job.json"


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One optimizer step. The seconds are measured; everything else is determined by the run."""

    step: int
    window: int
    """Samples in its window."""
    expert: str
    loss: float | None
    """None if not finite."""
    seconds: float
    """From the request for the first batch to the updated weights."""
    waited_s: float
    """The part of `seconds` spent waiting for batches."""
    wall_s: float
    """Since the end of the previous step, or since training began; includes logging, saving and validation."""


@dataclass(frozen=True, slots=True)
class StartupTimes:
    """Seconds since the start of the process."""

    began_s: float
    """Until training began: libraries, data, caches, model."""
    first_step_s: float
    """`began_s` plus the first step; excludes turns of the other process and a validation before the step."""
    cold: bool
    """Data were staged or encoded during this start; a later start reuses them."""


@dataclass(frozen=True, slots=True)
class MeasuredJob:
    """One training process, from its start to its end."""

    steps: tuple[MeasuredStep, ...]
    start: StartupTimes
    peaks: Mapping[str, int]
    """Peak bytes by kind: `process.resident`, `gpu.reserved`, …"""
    hints: Mapping[str, int]
    """Residency hints by outcome."""
    memory: tuple[str, ...]
    """The memory lines of the run's summary."""
    losses: str
    """Digest of its loss log."""
    versions: Mapping[str, str]
    """Package → version."""
    code: str
    """Folder of the package that ran."""
    seconds: float
    """Duration of the whole process, including turns of the other process."""

    @property
    def schedule(self) -> tuple[tuple[int, str], ...]:
        """(samples, expert) of each step."""
        return tuple((step.window, step.expert) for step in self.steps)

    @property
    def steps_after_first(self) -> tuple[MeasuredStep, ...]:
        """All steps except the first, which warms up; the first if there is no other."""
        return self.steps[1:] or self.steps

    @property
    def samples_per_s(self) -> float:
        """Over all steps except the first; includes the time between steps."""
        return sum(step.window for step in self.steps_after_first) / sum(step.wall_s for step in self.steps_after_first)


@dataclass(frozen=True, slots=True)
class MeasurementRequest:
    """The request to a measured process. It is a file, so that other versions and peer scripts can read it."""

    out: str
    """Folder for the results."""
    begun: float
    """CLOCK_MONOTONIC at the start of the process; all processes share this clock."""
    config: str = ""
    sets: tuple[str, ...] = ()
    """Overrides of settings, as `--set` takes them."""
    turn_steps: int = 0
    """Stop (SIGTSTP) when training begins and after every `turn_steps` steps, until SIGCONT arrives. 0: never."""
    stop_after: int = 0
    """Save and stop after this many steps although more are planned, so that data for all of them are encoded. 0: do
    not stop early."""
    trace: str = ""
    """Write a trace of torch's profiler to this file."""
    schedule: tuple[tuple[int, str], ...] = ()
    """For a peer: samples and expert of each step."""
    version: int = 1


def write_request(path: Path, request: MeasurementRequest) -> None:
    write_json(path, asdict(request))


def read_request(path: Path) -> MeasurementRequest:
    values = _known_fields(MeasurementRequest, _read_json_object(path))
    values["sets"] = tuple(values.get("sets", ()))
    values["schedule"] = tuple((int(window), str(expert)) for window, expert in values.get("schedule", ()))
    return MeasurementRequest(**values)


def write_job(folder: Path, job: MeasuredJob) -> None:
    """Write the steps as JSON lines, then the rest as one JSON file, whose presence means that the job is complete."""
    write_bytes(folder / STEPS_FILE, step_lines(job.steps))
    write_json(folder / JOB_FILE, job_to_json(job))


def read_job(folder: Path) -> MeasuredJob:
    steps = read_steps((folder / STEPS_FILE).read_bytes(), str(folder / STEPS_FILE))
    return parse_job(_read_json_object(folder / JOB_FILE), steps, str(folder / JOB_FILE))


def parse_job(document: Mapping[str, Any], steps: Sequence[MeasuredStep], source: str) -> MeasuredJob:
    try:
        start = StartupTimes(**_known_fields(StartupTimes, document["start"]))
        parsed = {"start": start, "steps": tuple(steps), "memory": tuple(document["memory"])}
        return MeasuredJob(**_known_fields(MeasuredJob, document) | parsed)
    except (KeyError, TypeError) as error:
        raise BaselineError(f"{source} is not the record of a measured job ({error}); capture it again") from error


def job_to_json(job: MeasuredJob) -> dict[str, JSON]:
    """Everything except the steps."""
    document: dict[str, Any] = {name: getattr(job, name) for name in MeasuredJob.__slots__ if name != "steps"}
    return document | {"start": asdict(job.start)}


def step_lines(steps: Iterable[MeasuredStep], **labels: JSON) -> bytes:
    """One JSON line per step, with `labels` added to each."""
    lines = (json.dumps({**labels, **asdict(step)}, allow_nan=False) for step in steps)
    return "".join(f"{line}\n" for line in lines).encode()


def read_steps(content: bytes, source: str) -> list[MeasuredStep]:
    steps = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            steps.append(MeasuredStep(**_known_fields(MeasuredStep, json.loads(line))))
        except (ValueError, TypeError) as error:
            raise BaselineError(f"{source}, line {number} is not a step ({error}); capture it again") from error
    return steps


def content_digest(content: bytes) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(content)


def finite_or_none(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


@dataclass(slots=True)
class PeakMemory:
    """The highest value seen for each kind of memory."""

    bytes_by_kind: dict[str, int] = field(default_factory=dict)

    def update(self, kinds: Mapping[str, int]) -> None:
        for kind, nbytes in kinds.items():
            self.bytes_by_kind[kind] = max(nbytes, self.bytes_by_kind.get(kind, 0))


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BaselineError(f"{path} cannot be read ({error}); capture it again") from error
    if not isinstance(document, dict):
        raise BaselineError(f"{path} is not a JSON object; capture it again")
    return document


def _known_fields(record_type: type, document: object) -> dict[str, Any]:
    """The entries of `document` that are fields of `record_type` in this version."""
    if not isinstance(document, Mapping):
        raise TypeError(f"{record_type.__name__} is {document!r}")
    names = {known.name for known in fields(record_type)}
    return {name: value for name, value in document.items() if name in names}
