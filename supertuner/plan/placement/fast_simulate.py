"""A choice judged in a millisecond: the clock of the software superchip without its pages.

The clock, its link and its order of copies are those of `memory/emulator/clock.py`; only the account of memory is a
number. `replay` plays the same step on the whole software superchip and must say the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from supertuner.memory.emulator.clock import Clock
from supertuner.memory.emulator.figures import Parameters
from supertuner.plan.placement.choice import Choice, Step
from supertuner.plan.placement.memory_needs import Needs, needs
from supertuner.plan.placement.simulate import Played, play
from supertuner.plan.placement.throughput import Limits, figures_of


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a choice needs and takes."""

    choice: Choice
    needs: Needs
    played: Played | None
    """None: it does not fit, or nobody had the patience."""

    @property
    def seconds(self) -> float:
        return math.inf if self.played is None else self.played.seconds


class QuickChip:
    def __init__(self, step: Step, limits: Limits) -> None:
        figures = figures_of("quick", step.rates, limits)
        self._clock = Clock(figures, Parameters(duplex=step.rates.duplex))
        self._gpu_bytes = limits.gpu_bytes

    @property
    def now(self) -> float:
        return self._clock.now

    def compute(self, seconds: float) -> None:
        self._clock.spend(seconds)

    def stream(self, nbytes: int, to_gpu: bool, after: float = 0.0) -> float:
        return self._clock.cross(nbytes if to_gpu else 0, 0 if to_gpu else nbytes, after)

    def wait(self, until: float) -> None:
        self._clock.wait(until)

    def hold(self, nbytes: int) -> None:
        assert nbytes <= self._gpu_bytes, "more is held than there is"


def judge(
    step: Step, choice: Choice, limits: Limits, *, needed: Needs | None = None, patience_s: float = math.inf
) -> Verdict:
    """How long a window of this choice takes, if it fits. `needed`: if that is known already; `patience_s`: with what
    waits longer than this, nobody need bother."""
    choice = choice.settled()
    needed = needed or needs(step, choice)
    if not needed.fit(limits, step.rates.one_pool):
        return Verdict(choice, needed, None)
    chip = QuickChip(step, limits)
    return Verdict(choice, needed, play(step, choice, needed, limits.gpu_bytes, chip, patience_s=patience_s))
