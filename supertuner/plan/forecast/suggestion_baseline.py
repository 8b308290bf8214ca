"""A run as its settings say, at the step that needs the most: what changes are measured against. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from supertuner.config.settings.run_config import RunConfig
from supertuner.plan.forecast.results import MachineCapacity
from supertuner.plan.placement.choice import PlacementChoice, TimedStep
from supertuner.plan.placement.memory_needs import compute_memory_needs
from supertuner.plan.placement.plan import ActivationPolicy, MemoryPlan
from supertuner.plan.placement.step_table import BlockCosts, OperatorWork, StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits


@dataclass(frozen=True, slots=True)
class SuggestionBaseline:
    """A run as its settings say, at the step that needs the most."""

    config: RunConfig
    capacity: MachineCapacity
    rates: MachineRates | None
    """None: a figure of the machine that times are made from is not known."""
    table: StepTable
    """Of the step in which nothing is recomputed."""
    choice: PlacementChoice
    """How the settings run it."""
    peak_bytes: int
    """Of the training phase, as traced."""
    other_phases_bytes: int
    """The fullest of the other phases."""
    host_bytes: int
    """What the run has in host memory already."""
    plan: MemoryPlan | None = None
    """The best placement there is; followed or not."""
    follows_plans: bool = False
    """The run follows it, and will follow another one after a change."""
    limits: MemoryLimits | None = None
    """What a plan may use."""

    @property
    def window_seconds(self) -> float | None:
        """Of a window, as the run does it."""
        if self.rates is None:
            return None
        if self.follows_this_plan and self.plan is not None and self.plan.modelled is not None:
            return self.plan.modelled.seconds
        return window_seconds_without_plan(self.table, self.choice, self.rates)

    @property
    def follows_this_plan(self) -> bool:
        return self.follows_plans and self.plan is not None and self.plan.fits

    @property
    def fits(self) -> bool:
        gpu_bytes = self.capacity.gpu_bytes
        if gpu_bytes is None:
            return False
        peak = 0 if self.follows_this_plan else self.peak_bytes
        return max(peak, self.other_phases_bytes) + self.host_bytes_in_pool <= gpu_bytes

    @property
    def host_bytes_in_pool(self) -> int:
        """Host memory that is the GPU's too."""
        return self.host_bytes if self.capacity.one_pool else 0


PLACEHOLDER_RATES = MachineRates(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, one_pool=False)
"""Memory does not depend on speed."""


def gpu_bytes_needed(table: StepTable, choice: PlacementChoice) -> int:
    return compute_memory_needs(TimedStep.from_table(table, PLACEHOLDER_RATES), choice).gpu_bytes


def configured_choice(table: StepTable, checkpointing: bool) -> PlacementChoice:
    """How a run without a plan runs a step: everything on the GPU; activations kept, or recomputed everywhere."""
    all_on_gpu = PlacementChoice.all_on_gpu(len(table.blocks))
    if not checkpointing:
        return all_on_gpu
    return replace(
        all_on_gpu,
        activations=tuple(
            ActivationPolicy.RECOMPUTE if b.recomputable else ActivationPolicy.KEEP for b in table.blocks
        ),
    )


def window_seconds_without_plan(table: StepTable, choice: PlacementChoice, rates: MachineRates) -> float:
    """Of a window in which nothing crosses the link."""
    step = TimedStep.from_table(table, rates)
    recompute_s = sum(
        s for s, fate in zip(step.forward_s, choice.activations, strict=True) if fate is ActivationPolicy.RECOMPUTE
    )
    return table.micro_batches * (step.micro_batch_s + recompute_s) + step.update_s


def scale_tokens(table: StepTable, factor: float) -> StepTable:
    """The step of a batch with so many times the tokens."""
    return replace(
        table,
        blocks=tuple(_scale_block(block, factor) for block in table.blocks),
        batch_bytes=round(table.batch_bytes * factor),
    )


def _scale_block(block: BlockCosts, factor: float) -> BlockCosts:
    return replace(
        block,
        saved_bytes=round(block.saved_bytes * factor),
        input_bytes=round(block.input_bytes * factor),
        forward_peak_bytes=round(block.forward_peak_bytes * factor),
        backward_peak_bytes=round(block.backward_peak_bytes * factor),
        forward=_scale_work(block.forward, factor),
        backward=_scale_work(block.backward, factor),
    )


def _scale_work(work: OperatorWork, factor: float) -> OperatorWork:
    return OperatorWork(work.matmul_flops * factor, work.other_flops * factor, work.gpu_bytes * factor, work.operators)
