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
from supertuner.core.host import Host
from supertuner.tools.baseline.capturing import Scenario
from supertuner.tools.baseline.record import Job, Order
from supertuner.tools.baseline.turns import Command, run_alone, run_in_turns

TURN_S: Final = 0.3
"""A turn takes about this long: short beside the weather of a shared machine, long beside a change of turns."""
TURNS: Final = 10
"""Turns that a run has at least."""
HOST_SHARE: Final = 0.8
GPU_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True)
class Side:
    command: Command
    work: Scenario
    schedule: tuple[tuple[int, str], ...] = ()
    """For a peer: what each step is to do."""

    def order(self, out: Path, label: str) -> Order:
        return replace(self.work.order(out, label), schedule=self.schedule)


@dataclass(slots=True)
class Pairs:
    """What rounds gave so far, old and new."""

    old: list[Job] = field(default_factory=list)
    new: list[Job] = field(default_factory=list)


def run_rounds(
    old: Side,
    new: Side,
    out: Path,
    *,
    turn_steps: int,
    rounds: int,
    most: int,
    undecided: Callable[[Pairs], bool],
    progress: Progress,
) -> Pairs:
    """`rounds`, and as many again while anything is undecided, but not more than `most`."""
    found = Pairs()
    while True:
        at = len(found.new) + 1
        with progress.phase(
            f"round {at} of {rounds if at <= rounds else most}: {old.command.title}, {new.command.title}"
        ):
            _round(old, new, out, at, turn_steps, found)
        if at >= most or (due(at, rounds) and not undecided(found)):
            return found


def due(at: int, rounds: int) -> bool:
    """Whether it is judged after round `at`, with more to come. Of how processes differ one round says nothing."""
    return at % rounds == 0 and at > 1


def looks(rounds: int, most: int) -> int:
    """How many times it may be judged in all."""
    return 1 + sum(due(at, rounds) for at in range(1, most))


def _round(old: Side, new: Side, out: Path, at: int, turn_steps: int, found: Pairs) -> None:
    sides = [(old, found.old, f"old-{at}"), (new, found.new, f"new-{at}")]
    if at % 2 == 0:
        sides.reverse()
    orders = [side.order(out, label) for side, _, label in sides]
    commands = [side.command for side, _, _ in sides]
    if turn_steps:
        jobs = run_in_turns(commands, orders, turn_steps)
    else:
        jobs = [run_alone(command, order) for command, order in zip(commands, orders, strict=True)]
    for (side, kept, _), job in zip(sides, jobs, strict=True):
        kept.append(job)
        side.work.forget()


def turn_steps_of(jobs: Sequence[Job], steps: int) -> int:
    """Steps of a turn, by what a step took."""
    step_s = min(step.seconds for job in jobs for step in job.steps)  # the first ones are slow
    return max(1, min(round(TURN_S / step_s), steps // TURNS))


def both_fit(peaks: Sequence[Mapping[str, int]], host: Host, gpu_bytes: int | None) -> bool:
    """Whether both can be in memory at once, by the peaks that each had alone."""
    available = host.memory_available()
    resident = sum(one.get("process.resident", 0) for one in peaks)
    if available is not None and resident > HOST_SHARE * available:
        return False
    on_gpu = sum(max(one.get("gpu.reserved", 0), one.get("gpu.used", 0)) for one in peaks)
    return not on_gpu or (gpu_bytes is not None and on_gpu <= GPU_SHARE * gpu_bytes)
