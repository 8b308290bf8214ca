"""Hand-made steps, machines and forecasts for the tests of the forecast."""

from __future__ import annotations

from typing import Any

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.types import GIB
from supertuner.memory.machines import MACHINES
from supertuner.plan.forecast.results import MachineCapacity, PhaseForecast, RunForecast, RunTiming, TimingScenario
from supertuner.plan.forecast.storage import StorageItem
from supertuner.plan.forecast.suggestion_baseline import SuggestionBaseline, configured_choice
from supertuner.plan.placement.choice import TimedStep
from supertuner.plan.placement.memory_needs import compute_memory_needs
from supertuner.plan.placement.step_table import BlockCosts, OperatorWork, StepTable
from supertuner.plan.placement.throughput import MachineRates


def a_table(
    blocks: int = 4, *, frozen: int = 7, trained: int = 0, saved: int = 10, idle: int = 0, micro_batches: int = 1
) -> StepTable:
    """Equal blocks with sizes in GiB; each has a forward pass of 100 TFLOP and a backward pass of twice that."""
    block = BlockCosts(
        name="blocks.0",
        frozen_bytes=frozen * GIB,
        trained_bytes=trained * GIB,
        gradient_bytes=trained * GIB,
        state_bytes=2 * trained * GIB,
        saved_bytes=saved * GIB,
        input_bytes=GIB,
        forward=OperatorWork(100e12, 0.0, 1e9, 10),
        backward=OperatorWork(200e12, 0.0, 1e9, 20),
        forward_peak_bytes=GIB,
        backward_peak_bytes=2 * GIB,
    )
    return StepTable("train model", (block,) * blocks, GIB, micro_batches, OperatorWork(), 0, idle * GIB)


def a_capacity(key: str = "gh200-96", gpu_gib: float | None = None, host_gib: float | None = None) -> MachineCapacity:
    machine = MACHINES[key]
    gpu = None if machine.gpu_bytes.value is None else int(machine.gpu_bytes.value)
    host = None if machine.host_bytes.value is None else int(machine.host_bytes.value)
    return MachineCapacity(
        machine,
        machine.title,
        gpu if gpu_gib is None else int(gpu_gib * GIB),
        host if host_gib is None else int(host_gib * GIB),
        "by hand",
    )


def a_baseline(table: StepTable, capacity: MachineCapacity | None = None, **settings: Any) -> SuggestionBaseline:
    """A baseline whose traced peak is exactly what the table needs."""
    config = RunConfig.model_validate(settings)
    capacity = capacity or a_capacity()
    rates = MachineRates.from_machine(capacity.machine, config.train.mixed_precision)
    choice = configured_choice(table, config.train.gradient_checkpointing)
    peak = compute_memory_needs(TimedStep.from_table(table, rates), choice).gpu_bytes
    return SuggestionBaseline(config, ("high_noise", "low_noise"), capacity, rates, table, choice, peak, 0, 0)


def a_phase(name: str = "train model", gpu_gib: float = 40.0, **more: Any) -> PhaseForecast:
    classes = {"frozen weights": int(gpu_gib * GIB * 3 / 4), "activations": int(gpu_gib * GIB / 4)}
    return PhaseForecast(name, classes, None, **more)


def a_forecast(*phases: PhaseForecast, capacity: MachineCapacity | None = None, **more: Any) -> RunForecast:
    stored = more.pop("stored", (StorageItem("cache of latents", "memory", GIB, "260 encoded samples"),))
    pace = TimingScenario(1.0, 20.0, 18.0, "compute", 40_000.0, 100.0, 500.0)
    timing = RunTiming((pace,), 4, 4, 4, 2000, 8000)
    more = {"timing": timing, **more}
    return RunForecast("Wan2.2", "lora of rank 32", capacity or a_capacity(), phases or (a_phase(),), stored, **more)
