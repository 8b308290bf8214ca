"""Measures two sides in rounds: in turns of a few steps if both fit into memory, otherwise one after the other.

Every round is a pair of new processes, and the side that goes first alternates from round to round. If the result is
undecided after the requested rounds, as many rounds follow again. It is judged only then and not after each round:
every look at the data is another chance of a false verdict, so fewer looks allow narrower intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from supertuner.core.errors import OptionError
from supertuner.core.events import Progress
from supertuner.core.host import HostFacts
from supertuner.tools.baseline.baseline_capture import DEFAULT_REPEATS, BaselineScenario
from supertuner.tools.baseline.measured_process import JobCommand, run_job, run_jobs_in_turns
from supertuner.tools.baseline.record import MeasuredJob, MeasurementRequest
from supertuner.tools.baseline.regression import DEFAULT_LIMIT, ComparisonTerms

TURN_S: Final = 0.3
"""Approximate length of a turn: short against load changes of a shared machine, long against the cost of a switch."""
MIN_TURNS: Final = 10
"""The least number of turns per run."""
HOST_SHARE: Final = 0.8
GPU_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True)
class ComparisonOptions:
    """How a comparison is made."""

    limit: float = DEFAULT_LIMIT
    rounds: int = DEFAULT_REPEATS
    max_rounds: int = 3 * DEFAULT_REPEATS
    steps: int | None = None
    """None: as many as the baseline has."""
    against: str | None = None
    """The code that runs as the old side (see `code_versions.other_code`); None: the baseline's own commit, if this
    checkout has it."""
    stored: bool = False
    """Run no old code: judge by the stored measurements."""

    def __post_init__(self) -> None:
        if self.max_rounds < self.rounds:
            problem = f"--most {self.max_rounds} is below --repeats {self.rounds}"
            raise OptionError(f"{problem}; raise it, or lower --repeats")
        if self.against is not None and self.stored:
            raise OptionError("--against runs other code and --stored runs none; give only one of them")

    def comparison_terms(self, turn_steps: int) -> ComparisonTerms:
        return ComparisonTerms(turn_steps, self.limit, count_looks(self.rounds, self.max_rounds))


@dataclass(frozen=True, slots=True)
class ComparisonSide:
    """One of the two things that are compared: a command and the scenario that it runs."""

    command: JobCommand
    scenario: BaselineScenario
    schedule: tuple[tuple[int, str], ...] = ()
    """For a peer: samples and expert of each step."""

    def request(self, out: Path, label: str) -> MeasurementRequest:
        return replace(self.scenario.request(out, label), schedule=self.schedule)


@dataclass(slots=True)
class JobPairs:
    """The jobs of all rounds so far; `old[i]` and `new[i]` ran in the same round."""

    old: list[MeasuredJob] = field(default_factory=list)
    new: list[MeasuredJob] = field(default_factory=list)


def run_rounds(
    old: ComparisonSide,
    new: ComparisonSide,
    out: Path,
    options: ComparisonOptions,
    turn_steps: int,
    undecided: Callable[[JobPairs], bool],
    progress: Progress,
) -> JobPairs:
    """Run `options.rounds` rounds, and as many again while the result is undecided, up to `options.max_rounds`.

    `turn_steps` is the number of steps per turn; 0 runs the two sides one after the other.
    """
    pairs = JobPairs()
    rounds, max_rounds = options.rounds, options.max_rounds
    while True:
        round_number = len(pairs.new) + 1
        planned = rounds if round_number <= rounds else max_rounds
        with progress.phase(f"round {round_number} of {planned}: {old.command.title}, {new.command.title}"):
            _run_round(old, new, out, round_number, turn_steps, pairs)
        if round_number >= max_rounds or (is_judged_after(round_number, rounds) and not undecided(pairs)):
            return pairs


def is_judged_after(round_number: int, rounds: int) -> bool:
    """Whether the result is judged after this round although more may follow. One round is never judged: it does not
    show how much processes differ from each other."""
    return round_number % rounds == 0 and round_number > 1


def count_looks(rounds: int, max_rounds: int) -> int:
    """How many times the result may be judged in total."""
    return 1 + sum(is_judged_after(at, rounds) for at in range(1, max_rounds))


def _run_round(
    old: ComparisonSide, new: ComparisonSide, out: Path, round_number: int, turn_steps: int, pairs: JobPairs
) -> None:
    sides = [(old, pairs.old, f"old-{round_number}"), (new, pairs.new, f"new-{round_number}")]
    if round_number % 2 == 0:
        sides.reverse()
    requests = [side.request(out, label) for side, _, label in sides]
    commands = [side.command for side, _, _ in sides]
    if turn_steps:
        jobs = run_jobs_in_turns(commands, requests, turn_steps)
    else:
        jobs = [run_job(command, request) for command, request in zip(commands, requests, strict=True)]
    for (side, side_jobs, _), job in zip(sides, jobs, strict=True):
        side_jobs.append(job)
        side.scenario.remove_run_folders()


def choose_turn_steps(jobs: Sequence[MeasuredJob], steps: int) -> int:
    """Steps per turn, computed from the fastest measured step; `steps` is the length of a run."""
    step_s = min(step.seconds for job in jobs for step in job.steps)  # the minimum, because the first steps are slow
    return max(1, min(round(TURN_S / step_s), steps // MIN_TURNS))


def both_fit(peaks: Sequence[Mapping[str, int]], host: HostFacts, gpu_bytes: int | None) -> bool:
    """Whether both sides fit into memory at once, judged by the peaks that each had alone."""
    available = host.memory_available()
    resident = sum(peak.get("process.resident", 0) for peak in peaks)
    if available is not None and resident > HOST_SHARE * available:
        return False
    on_gpu = sum(max(peak.get("gpu.reserved", 0), peak.get("gpu.used", 0)) for peak in peaks)
    return not on_gpu or (gpu_bytes is not None and on_gpu <= GPU_SHARE * gpu_bytes)
