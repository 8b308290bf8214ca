"""Two sides measured in rounds: in turns of some steps where memory holds both, else one after the other.

Every round is a pair of new processes, and which of them goes first changes from round to round. While the noise does
not let tell as many rounds follow again. Nobody looks in between: each look is a chance to be fooled, and the fewer
there may be, the more can be told from each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from supertuner.core.events import Progress
from supertuner.core.host import HostFacts
from supertuner.tools.baseline.baseline_capture import BaselineScenario
from supertuner.tools.baseline.measured_process import JobCommand, run_job, run_jobs_in_turns
from supertuner.tools.baseline.record import MeasuredJob, MeasurementRequest

TURN_S: Final = 0.3
"""A turn takes about this long: short beside the weather of a shared machine, long beside a change of turns."""
MIN_TURNS: Final = 10
"""Turns that a run has at least."""
HOST_SHARE: Final = 0.8
GPU_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True)
class ComparisonSide:
    command: JobCommand
    scenario: BaselineScenario
    schedule: tuple[tuple[int, str], ...] = ()
    """For a peer: what each step is to do."""

    def request(self, out: Path, label: str) -> MeasurementRequest:
        return replace(self.scenario.request(out, label), schedule=self.schedule)


@dataclass(slots=True)
class JobPairs:
    """What rounds gave so far, old and new."""

    old: list[MeasuredJob] = field(default_factory=list)
    new: list[MeasuredJob] = field(default_factory=list)


def run_rounds(
    old: ComparisonSide,
    new: ComparisonSide,
    out: Path,
    *,
    turn_steps: int,
    rounds: int,
    max_rounds: int,
    undecided: Callable[[JobPairs], bool],
    progress: Progress,
) -> JobPairs:
    """`rounds`, and as many again while anything is undecided, but not more than `most`."""
    pairs = JobPairs()
    while True:
        round_number = len(pairs.new) + 1
        with progress.phase(
            f"round {round_number} of {rounds if round_number <= rounds else max_rounds}: {old.command.title}, {new.command.title}"
        ):
            _run_round(old, new, out, round_number, turn_steps, pairs)
        if round_number >= max_rounds or (is_judged_after(round_number, rounds) and not undecided(pairs)):
            return pairs


def is_judged_after(round_number: int, rounds: int) -> bool:
    """Whether it is judged after round `at`, with more to come. Of how processes differ one round says nothing."""
    return round_number % rounds == 0 and round_number > 1


def count_looks(rounds: int, max_rounds: int) -> int:
    """How many times it may be judged in all."""
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
        jobs = [run_job(command, order) for command, order in zip(commands, requests, strict=True)]
    for (side, side_jobs, _), job in zip(sides, jobs, strict=True):
        side_jobs.append(job)
        side.scenario.remove_run_folders()


def choose_turn_steps(jobs: Sequence[MeasuredJob], steps: int) -> int:
    """Steps of a turn, by what a step took."""
    step_s = min(step.seconds for job in jobs for step in job.steps)  # the first ones are slow
    return max(1, min(round(TURN_S / step_s), steps // MIN_TURNS))


def both_fit(peaks: Sequence[Mapping[str, int]], host: HostFacts, gpu_bytes: int | None) -> bool:
    """Whether both can be in memory at once, by the peaks that each had alone."""
    available = host.memory_available()
    resident = sum(one.get("process.resident", 0) for one in peaks)
    if available is not None and resident > HOST_SHARE * available:
        return False
    on_gpu = sum(max(one.get("gpu.reserved", 0), one.get("gpu.used", 0)) for one in peaks)
    return not on_gpu or (gpu_bytes is not None and on_gpu <= GPU_SHARE * gpu_bytes)
