"""Replays a plan on the emulated superchip, which raises if memory is exceeded and whose clock models the time.

The step follows the same rules as in the search (`simulate.py`). The machine differs: its device memory is allocated
and freed page by page, and its link is shared with everything else on the chip. All times are modelled.
"""

from __future__ import annotations

from dataclasses import dataclass

from supertuner.core.types import MIB
from supertuner.memory.driver import MemoryKind
from supertuner.memory.emulator.clock import MemoryTraffic
from supertuner.memory.emulator.configuration import EmulatorParameters
from supertuner.memory.emulator.superchip import EmulatedSuperchip
from supertuner.memory.machines import MachineSpec
from supertuner.plan.placement.choice import PlacementChoice, TimedStep
from supertuner.plan.placement.memory_needs import compute_memory_needs
from supertuner.plan.placement.plan import MemoryPlan
from supertuner.plan.placement.simulate import SimulatedWindow, simulate_window
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits, emulator_figures

PAGE_BYTES = 2 * MIB
"""Size of the modelled pages: the driver's blocks. Plans move whole tensors, so smaller pages give the same result."""


@dataclass(frozen=True, slots=True)
class SuperchipReplay:
    """Times, peak and traffic of one window on the emulated superchip."""

    simulated: SimulatedWindow
    gpu_peak_bytes: int
    traffic: MemoryTraffic

    @property
    def seconds(self) -> float:
        return self.simulated.seconds


class SuperchipMachine:
    """Implements `SimulatedMachine` on the emulated superchip. The memory in use is one allocation of device memory,
    replaced when it grows or shrinks, so that the chip itself refuses more than it has."""

    def __init__(self, chip: EmulatedSuperchip) -> None:
        self._chip = chip
        self._address: int | None = None
        self._held_bytes = 0
        self.peak_bytes = 0

    @property
    def now(self) -> float:
        return self._chip.clock.now

    def compute(self, seconds: float) -> None:
        self._chip.compute(seconds)

    def start_copy(self, nbytes: int, to_gpu: bool, after: float = 0.0) -> float:
        return self._chip.copy_async(nbytes, to_gpu, after)

    def wait_until(self, time_s: float) -> None:
        self._chip.wait_until(time_s)

    def set_gpu_bytes_in_use(self, nbytes: int) -> None:
        whole_pages_bytes = nbytes // PAGE_BYTES * PAGE_BYTES  # rounded down: the plan does not pay for our pages
        self.peak_bytes = max(self.peak_bytes, nbytes)
        if whole_pages_bytes == self._held_bytes:
            return
        if self._address is not None:
            self._chip.free(self._address)
            self._address = None
        self._held_bytes = whole_pages_bytes
        if whole_pages_bytes:
            self._address = self._chip.allocate(MemoryKind.DEVICE, whole_pages_bytes)


def build_superchip(
    machine: MachineSpec, rates: MachineRates, limits: MemoryLimits, page_bytes: int = PAGE_BYTES
) -> EmulatedSuperchip:
    """The machine with the plan's rates and limits. A batch of page faults has the same bytes for every page size."""
    standard = EmulatorParameters()
    batch = standard.fault_batch_pages * 65536 // page_bytes
    parameters = EmulatorParameters(fault_batch_pages=max(1, batch), duplex=rates.duplex)
    figures = emulator_figures(machine.title, rates, limits, ats=machine.ats)
    return EmulatedSuperchip(figures, page_bytes=page_bytes, parameters=parameters)


def replay_plan(
    table: StepTable, plan: MemoryPlan, machine: MachineSpec, limits: MemoryLimits, *, rates: MachineRates | None = None
) -> SuperchipReplay:
    """Replays one window of a plan. The emulator raises if the plan does not fit."""
    known_rates = MachineRates.from_machine(machine) if rates is None else rates
    step, choice = (
        TimedStep.from_table(table, known_rates),
        PlacementChoice.from_plan(plan).without_immediate_refetches(),
    )
    chip = build_superchip(machine, known_rates, limits)
    superchip_machine = SuperchipMachine(chip)
    simulated = simulate_window(step, choice, compute_memory_needs(step, choice), limits.gpu_bytes, superchip_machine)
    assert simulated is not None, "the waiting time is not limited here"
    return SuperchipReplay(simulated, superchip_machine.peak_bytes, chip.traffic)
