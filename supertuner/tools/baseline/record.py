"""What one measured job left: each step's time and loss, its start, its peaks of memory. Data, and their JSON.

A job is written by the process that trained and read by the one that judges, which may be of another version: fields
may come, and a reader leaves out those that it does not know.
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
    """One optimizer step. Seconds are of a clock; everything else is a function of the run."""

    step: int
    window: int
    """Samples of its window."""
    expert: str
    loss: float | None
    """None: no number."""
    seconds: float
    """From the first batch that was asked for to the updated weights."""
    waited_s: float
    """Of these, waiting for batches."""
    wall_s: float
    """Since the step before ended, or since training began: with logs, saves and validations in between."""


@dataclass(frozen=True, slots=True)
class StartupTimes:
    """From the command to training, in seconds."""

    began_s: float
    """Until training began: libraries, data, caches, model."""
    first_step_s: float
    """And the first step; neither others' turns nor a validation before it are in it."""
    cold: bool
    """Data were staged or encoded: another start finds them."""


@dataclass(frozen=True, slots=True)
class MeasuredJob:
    """One process that trained, from its start to its end."""

    steps: tuple[MeasuredStep, ...]
    start: StartupTimes
    peaks: Mapping[str, int]
    """Peak bytes by kind: `process.resident`, `gpu.reserved`, …"""
    hints: Mapping[str, int]
    """Residency hints by outcome."""
    memory: tuple[str, ...]
    """The run's own words on its memory."""
    losses: str
    """Digest of its loss log."""
    versions: Mapping[str, str]
    code: str
    """Where its code lay."""
    seconds: float
    """Of the whole process, turns of others included."""

    @property
    def schedule(self) -> tuple[tuple[int, str], ...]:
        """What each step was given to do."""
        return tuple((step.window, step.expert) for step in self.steps)

    @property
    def samples_per_s(self) -> float:
        """Over all steps but the first, which warms up; everything between them counts."""
        counted = self.steps[1:] or self.steps
        return sum(step.window for step in counted) / sum(step.wall_s for step in counted)


@dataclass(frozen=True, slots=True)
class MeasurementRequest:
    """What the process is told to do; a file, so that any version of the program, and any script, can read it."""

    out: str
    """Folder for what it leaves."""
    begun: float
    """CLOCK_MONOTONIC, which all processes share, when it was started."""
    config: str = ""
    sets: tuple[str, ...] = ()
    turn_steps: int = 0
    """Stop (SIGTSTP) when training begins and after every so many steps, until somebody says go on; 0: never."""
    stop_after: int = 0
    """Save and stop after so many steps, though more were planned: data are encoded for all of them. 0: do them all."""
    trace: str = ""
    """Write a trace of torch's profiler here, of some steps after the first ones."""
    schedule: tuple[tuple[int, str], ...] = ()
    """For peers: samples and expert of each step."""
    version: int = 1


def write_request(path: Path, request: MeasurementRequest) -> None:
    write_json(path, asdict(request))


def read_request(path: Path) -> MeasurementRequest:
    values = _known_fields(MeasurementRequest, _read_json_object(path))
    values["sets"] = tuple(values.get("sets", ()))
    values["schedule"] = tuple((int(window), str(expert)) for window, expert in values.get("schedule", ()))
    return MeasurementRequest(**values)


def write_job(folder: Path, job: MeasuredJob) -> None:
    """Steps as lines, the rest as one object; the object last, because it says that all is there."""
    write_bytes(folder / STEPS_FILE, step_lines(job.steps))
    rest = {name.name: getattr(job, name.name) for name in fields(MeasuredJob) if name.name != "steps"}
    write_json(folder / JOB_FILE, rest | {"start": asdict(job.start)})


def read_job(folder: Path) -> MeasuredJob:
    rest = _read_json_object(folder / JOB_FILE)
    return parse_job(
        rest, read_steps((folder / STEPS_FILE).read_bytes(), str(folder / STEPS_FILE)), str(folder / JOB_FILE)
    )


def parse_job(document: Mapping[str, Any], steps: Sequence[MeasuredStep], source: str) -> MeasuredJob:
    try:
        start = StartupTimes(**_known_fields(StartupTimes, document["start"]))
        values = _known_fields(MeasuredJob, document) | {
            "start": start,
            "steps": tuple(steps),
            "memory": tuple(document["memory"]),
        }
        return MeasuredJob(**values)
    except (KeyError, TypeError) as error:
        raise BaselineError(f"{source} is not what a measured job leaves ({error}); capture it again") from error


def job_to_json(job: MeasuredJob) -> dict[str, JSON]:
    """Everything but the steps, for the file that holds all jobs of a baseline."""
    document: dict[str, Any] = {
        name.name: getattr(job, name.name) for name in fields(MeasuredJob) if name.name != "steps"
    }
    return document | {"start": asdict(job.start)}


def step_lines(steps: Iterable[MeasuredStep], **labels: JSON) -> bytes:
    """A line for each step; `of` says in each whose they are."""
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


def finite_or_none(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


@dataclass(slots=True)
class PeakMemory:
    """The highest of each kind that was seen."""

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
    """The fields that this version knows."""
    if not isinstance(document, Mapping):
        raise TypeError(f"{record_type.__name__} is {document!r}")
    names = {one.name for one in fields(record_type)}
    return {name: value for name, value in document.items() if name in names}
