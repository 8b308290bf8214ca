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

STEPS: Final = "steps.jsonl"
JOB: Final = "job.json"


@dataclass(frozen=True, slots=True)
class Step:
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
class Start:
    """From the command to training, in seconds."""

    began_s: float
    """Until training began: libraries, data, caches, model."""
    first_step_s: float
    """And the first step; neither others' turns nor a validation before it are in it."""
    cold: bool
    """Data were staged or encoded: another start finds them."""


@dataclass(frozen=True, slots=True)
class Job:
    """One process that trained, from its start to its end."""

    steps: tuple[Step, ...]
    start: Start
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
class Order:
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


def write_order(path: Path, order: Order) -> None:
    write_json(path, asdict(order))


def read_order(path: Path) -> Order:
    found = _known(Order, _object(path))
    found["sets"] = tuple(found.get("sets", ()))
    found["schedule"] = tuple((int(window), str(expert)) for window, expert in found.get("schedule", ()))
    return Order(**found)


def write_job(folder: Path, job: Job) -> None:
    """Steps as lines, the rest as one object; the object last, because it says that all is there."""
    write_bytes(folder / STEPS, step_lines(job.steps))
    rest = {name.name: getattr(job, name.name) for name in fields(Job) if name.name != "steps"}
    write_json(folder / JOB, rest | {"start": asdict(job.start)})


def read_job(folder: Path) -> Job:
    rest = _object(folder / JOB)
    return job_of(rest, read_steps((folder / STEPS).read_bytes(), str(folder / STEPS)), str(folder / JOB))


def job_of(rest: Mapping[str, Any], steps: Sequence[Step], where: str) -> Job:
    try:
        start = Start(**_known(Start, rest["start"]))
        found = _known(Job, rest) | {"start": start, "steps": tuple(steps), "memory": tuple(rest["memory"])}
        return Job(**found)
    except (KeyError, TypeError) as error:
        raise BaselineError(f"{where} is not what a measured job leaves ({error}); capture it again") from error


def job_json(job: Job) -> dict[str, JSON]:
    """Everything but the steps, for the file that holds all jobs of a baseline."""
    whole: dict[str, Any] = {name.name: getattr(job, name.name) for name in fields(Job) if name.name != "steps"}
    return whole | {"start": asdict(job.start)}


def step_lines(steps: Iterable[Step], **of: JSON) -> bytes:
    """A line for each step; `of` says in each whose they are."""
    lines = (json.dumps({**of, **asdict(step)}, allow_nan=False) for step in steps)
    return "".join(f"{line}\n" for line in lines).encode()


def read_steps(content: bytes, where: str) -> list[Step]:
    found = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            found.append(Step(**_known(Step, json.loads(line))))
        except (ValueError, TypeError) as error:
            raise BaselineError(f"{where}, line {number} is not a step ({error}); capture it again") from error
    return found


def finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


@dataclass(slots=True)
class Peaks:
    """The highest of each kind that was seen."""

    found: dict[str, int] = field(default_factory=dict)

    def see(self, kinds: Mapping[str, int]) -> None:
        for kind, nbytes in kinds.items():
            self.found[kind] = max(nbytes, self.found.get(kind, 0))


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BaselineError(f"{path} cannot be read ({error}); capture it again") from error
    if not isinstance(found, dict):
        raise BaselineError(f"{path} is not a JSON object; capture it again")
    return found


def _known(kind: type, given: object) -> dict[str, Any]:
    """The fields that this version knows."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{kind.__name__} is {given!r}")
    names = {one.name for one in fields(kind)}
    return {name: value for name, value in given.items() if name in names}
