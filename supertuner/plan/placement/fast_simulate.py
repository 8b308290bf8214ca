"""Evaluates a placement in about a millisecond: the emulator's clock without its pages.

The clock, the link and the order of copies are those of `memory/emulator/clock.py`; memory in use is one number instead
of pages. `benchmarks/plan_replay.py` simulates the same step on the whole emulated superchip and must give the same
result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from supertuner.memory.emulator.clock import EmulatorClock
from supertuner.memory.emulator.configuration import EmulatorParameters
from supertuner.plan.placement.choice import PlacementChoice, TimedStep
from supertuner.plan.placement.memory_needs import MemoryNeeds, compute_memory_needs
from supertuner.plan.placement.simulate import SimulatedWindow, simulate_window
from supertuner.plan.placement.throughput import MemoryLimits, emulator_figures


@dataclass(frozen=True, slots=True)
class ChoiceEvaluation:
    """Memory and modelled time of a placement."""

    choice: PlacementChoice
    needs: MemoryNeeds
    simulated: SimulatedWindow | None
    """None: it does not fit, or the simulation exceeded its waiting limit."""

    @property
    def seconds(self) -> float:
        return math.inf if self.simulated is None else self.simulated.seconds


class FastSimulatedMachine:
    """Implements `SimulatedMachine` with a clock and a byte count."""

    def __init__(self, step: TimedStep, limits: MemoryLimits) -> None:
        figures = emulator_figures("quick", step.rates, limits)
        self._clock = EmulatorClock(figures, EmulatorParameters(duplex=step.rates.duplex))
        self._gpu_bytes = limits.gpu_bytes

    @property
    def now(self) -> float:
        return self._clock.now

    def compute(self, seconds: float) -> None:
        self._clock.advance(seconds)

    def start_copy(self, nbytes: int, to_gpu: bool, after: float = 0.0) -> float:
        return self._clock.transfer(nbytes if to_gpu else 0, 0 if to_gpu else nbytes, after)

    def wait_until(self, time_s: float) -> None:
        self._clock.wait_until(time_s)

    def set_gpu_bytes_in_use(self, nbytes: int) -> None:
        assert nbytes <= self._gpu_bytes, "the simulation exceeds GPU memory"


def evaluate_choice(
    step: TimedStep,
    choice: PlacementChoice,
    limits: MemoryLimits,
    *,
    memory_needs: MemoryNeeds | None = None,
    max_waiting_s: float = math.inf,
) -> ChoiceEvaluation:
    """Memory of a placement and, if it fits, the modelled time of a window.

    `memory_needs`: if they are computed already. `max_waiting_s`: the simulation stops when the computation has waited
    longer than this, because the caller knows a better placement.
    """
    choice = choice.without_immediate_refetches()
    memory_needs = memory_needs or compute_memory_needs(step, choice)
    if not memory_needs.fits(limits, step.rates.one_pool):
        return ChoiceEvaluation(choice, memory_needs, None)
    machine = FastSimulatedMachine(step, limits)
    window = simulate_window(step, choice, memory_needs, limits.gpu_bytes, machine, max_waiting_s=max_waiting_s)
    return ChoiceEvaluation(choice, memory_needs, window)
