"""Steps and machines made by hand, for tests of what is worked out from them."""

from __future__ import annotations

from typing import Any

from supertuner.config.settings.tree import RunConfig
from supertuner.core.types import GIB
from supertuner.memory.machines import MACHINES
from supertuner.plan.forecast.context import Situation, as_configured
from supertuner.plan.forecast.model import Forecast, Pace, Phase, Room, Timing
from supertuner.plan.forecast.storage import Stored
from supertuner.plan.placement.choice import Step
from supertuner.plan.placement.memory_needs import needs
from supertuner.plan.placement.step_table import Block, StepTable, Work
from supertuner.plan.placement.throughput import Rates


def a_table(
    blocks: int = 4, *, frozen: int = 7, trained: int = 0, saved: int = 10, idle: int = 0, micro_batches: int = 1
) -> StepTable:
    """Blocks alike, sizes in GiB; a forward pass of 100 TFLOP in each, a backward pass of twice that."""
    block = Block(
        name="blocks.0",
        frozen_bytes=frozen * GIB,
        trained_bytes=trained * GIB,
        gradient_bytes=trained * GIB,
        state_bytes=2 * trained * GIB,
        saved_bytes=saved * GIB,
        input_bytes=GIB,
        forward=Work(100e12, 0.0, 1e9, 10),
        backward=Work(200e12, 0.0, 1e9, 20),
        forward_peak_bytes=GIB,
        backward_peak_bytes=2 * GIB,
    )
    return StepTable("train model", (block,) * blocks, GIB, micro_batches, Work(), 0, idle * GIB)


def a_room(key: str = "gh200-96", gpu_gib: float | None = None, host_gib: float | None = None) -> Room:
    machine = MACHINES[key]
    gpu = None if machine.gpu_bytes.value is None else int(machine.gpu_bytes.value)
    host = None if machine.host_bytes.value is None else int(machine.host_bytes.value)
    return Room(
        machine,
        machine.title,
        gpu if gpu_gib is None else int(gpu_gib * GIB),
        host if host_gib is None else int(host_gib * GIB),
        "by hand",
    )


def a_situation(table: StepTable, room: Room | None = None, **settings: Any) -> Situation:
    """Traced as the table says: then differences are all that counts."""
    config = RunConfig.model_validate(settings)
    room = room or a_room()
    rates = Rates.of(room.machine, config.train.mixed_precision)
    choice = as_configured(table, config.train.gradient_checkpointing)
    peak = needs(Step.of(table, rates), choice).gpu
    return Situation(config, room, rates, table, choice, peak, 0, 0)


def a_phase(name: str = "train model", gpu_gib: float = 40.0, **more: Any) -> Phase:
    classes = {"frozen weights": int(gpu_gib * GIB * 3 / 4), "activations": int(gpu_gib * GIB / 4)}
    return Phase(name, classes, None, **more)


def a_forecast(*phases: Phase, room: Room | None = None, **more: Any) -> Forecast:
    stored = more.pop("stored", (Stored("cache of latents", "memory", GIB, "260 encoded samples"),))
    pace = Pace(1.0, 20.0, 18.0, "compute", 40_000.0, 100.0, 500.0)
    timing = Timing((pace,), 4, 4, 4, 2000, 8000)
    more = {"timing": timing, **more}
    return Forecast("Wan2.2", "lora of rank 32", room or a_room(), phases or (a_phase(),), stored, **more)
