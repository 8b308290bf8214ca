"""The baseline that suggested changes are compared with: the configured run at its fullest step. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from supertuner.config.settings.run_config import RunConfig
from supertuner.plan.forecast.results import MachineCapacity
from supertuner.plan.placement.choice import PlacementChoice, TimedStep, recompute_where_possible
from supertuner.plan.placement.plan import MemoryPlan
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits


@dataclass(frozen=True, slots=True)
class SuggestionBaseline:
    """The configured run at the step that needs the most memory."""

    config: RunConfig
    experts: tuple[str, ...]
    """Names of the experts that are trained."""
    capacity: MachineCapacity
    rates: MachineRates | None
    """None: a rate that times are modelled from is unknown."""
    table: StepTable
    """The step without recomputation."""
    choice: PlacementChoice
    """How the settings run the step without a plan."""
    peak_bytes: int
    """Peak of the training phase, as traced, with everything on the GPU."""
    other_phases_bytes: int
    """Peak of the fullest other phase."""
    host_bytes: int
    """Host memory that staged files, caches and batches take."""
    plan: MemoryPlan | None = None
    """The best plan, whether the run follows it or not."""
    follows_plans: bool = False
    """Whether the run follows plans: after a change it would follow a new one."""
    limits: MemoryLimits | None = None
    """The memory that a plan may use."""
    plan_gap_bytes: int = 0
    """What the caching allocator reserves under `plan` beyond the live bytes. A changed step has no trace to model this
    from: it counts as much."""

    @property
    def window_seconds(self) -> float | None:
        """Modelled time of a window as the run computes it; None: a rate is unknown."""
        if self.rates is None:
            return None
        if self.follows_this_plan and self.plan is not None and self.plan.modelled is not None:
            return self.plan.modelled.seconds
        return seconds_without_plan(self.table, self.choice, self.rates)

    @property
    def follows_this_plan(self) -> bool:
        return self.follows_plans and self.plan is not None and self.plan.fits

    @property
    def fits(self) -> bool:
        limit = self.capacity.gpu_limit_bytes
        if limit is None:
            return False
        peak = 0 if self.follows_this_plan else self.peak_bytes
        return max(peak, self.other_phases_bytes) + self.host_bytes_in_pool <= limit

    @property
    def live_limits(self) -> MemoryLimits | None:
        """`limits` for live bytes alone: without the gaps between them."""
        limits = self.limits
        return None if limits is None else replace(limits, gpu_bytes=max(0, limits.gpu_bytes - self.plan_gap_bytes))

    @property
    def host_bytes_in_pool(self) -> int:
        """Host memory that comes out of the GPU's memory: all of it on a one-pool machine."""
        return self.host_bytes if self.capacity.one_pool else 0


def configured_choice(table: StepTable, checkpointing: bool) -> PlacementChoice:
    """How a run without a plan runs a step: everything on the GPU, activations kept or recomputed in every block."""
    all_on_gpu = PlacementChoice.all_on_gpu(len(table.blocks))
    return replace(all_on_gpu, activations=recompute_where_possible(table.blocks)) if checkpointing else all_on_gpu


def seconds_without_plan(table: StepTable, choice: PlacementChoice, rates: MachineRates) -> float:
    """Modelled time of a window with everything on the GPU, so that nothing crosses the link."""
    step = TimedStep.from_table(table, rates)
    return step.passes_s(choice.activations) + step.update_s
