"""A plan played on the software superchip, whose memory refuses what does not fit and whose clock tells the time.

The step is walked by the same rules as in the search (`playing`); what differs is the machine below: device memory that
is really taken and given back, and a link shared with whatever else the chip does. All times are modelled.
"""

from __future__ import annotations

from dataclasses import dataclass

from supertuner.core.types import MIB
from supertuner.memory.driver import Kind
from supertuner.memory.emulator.clock import Traffic
from supertuner.memory.emulator.figures import Parameters
from supertuner.memory.emulator.superchip import Superchip
from supertuner.memory.machines import Machine
from supertuner.plan.placement.choice import Choice, Step
from supertuner.plan.placement.memory_needs import needs
from supertuner.plan.placement.plan import Plan
from supertuner.plan.placement.simulate import Played, play
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.throughput import Limits, Rates, figures_of

PAGE_BYTES = 2 * MIB
"""Of the modelled pages: whole blocks of the driver. Plans move whole tensors, so smaller ones would say the same."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the software superchip said."""

    played: Played
    gpu_peak_bytes: int
    traffic: Traffic

    @property
    def seconds(self) -> float:
        return self.played.seconds


class OnSuperchip:
    """The verbs of a step over the software superchip. What is held is one allocation of device memory, made anew when
    it grows or shrinks: more than there is is refused by the chip itself."""

    def __init__(self, chip: Superchip) -> None:
        self._chip = chip
        self._address: int | None = None
        self._held = 0
        self.peak = 0

    @property
    def now(self) -> float:
        return self._chip.clock.now

    def compute(self, seconds: float) -> None:
        self._chip.compute(seconds)

    def stream(self, nbytes: int, to_gpu: bool, after: float = 0.0) -> float:
        return self._chip.stream(nbytes, to_gpu, after)

    def wait(self, until: float) -> None:
        self._chip.wait(until)

    def hold(self, nbytes: int) -> None:
        whole = nbytes // PAGE_BYTES * PAGE_BYTES  # as one allocation, rounding up would be ours and not the plan's
        self.peak = max(self.peak, nbytes)
        if whole == self._held:
            return
        if self._address is not None:
            self._chip.free(self._address)
            self._address = None
        self._held = whole
        if whole:
            self._address = self._chip.allocate(Kind.DEVICE, whole)


def superchip_for(machine: Machine, rates: Rates, limits: Limits, page_bytes: int = PAGE_BYTES) -> Superchip:
    """The machine as the plan sees it. Faults come in batches of as many bytes whatever the page."""
    standard = Parameters()
    batch = standard.fault_batch_pages * 65536 // page_bytes
    parameters = Parameters(fault_batch_pages=max(1, batch), duplex=rates.duplex)
    figures = figures_of(machine.title, rates, limits, ats=machine.ats)
    return Superchip(figures, page_bytes=page_bytes, parameters=parameters)


def replay(table: StepTable, plan: Plan, machine: Machine, limits: Limits, *, rates: Rates | None = None) -> Replayed:
    """Play one window of a plan. Refused (`memory.driver.Refused`) if it does not fit."""
    known = Rates.of(machine) if rates is None else rates
    step, choice = Step.of(table, known), Choice.of(plan).settled()
    chip = superchip_for(machine, known, limits)
    runner = OnSuperchip(chip)
    played = play(step, choice, needs(step, choice), limits.gpu_bytes, runner)
    assert played is not None, "patience has no end here"
    return Replayed(played, runner.peak, chip.traffic)
