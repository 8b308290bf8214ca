"""One configured run on one machine, as far as it is known before it begins: its shapes, its traced steps, its plans.

`Tracing` gives the traces, made now or kept from an earlier look. Nothing is loaded, staged or written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import ModelError
from supertuner.data.ordering.buckets import Bucket
from supertuner.models.adapters import attach as adapters
from supertuner.models.spec import Expert, Family, ModelDescription
from supertuner.optim.schedule import TrainingSchedule
from supertuner.plan.forecast import dataset_sizes as holdings
from supertuner.plan.forecast import duration
from supertuner.plan.forecast.dataset_sizes import DatasetSize
from supertuner.plan.forecast.results import HOST_SHARE, TIGHT_SHARE, MachineCapacity
from supertuner.plan.forecast.storage import EncodedSizes, ExpertStateSizes, StorageItem, list_storage, total_storage
from supertuner.plan.forecast.suggestion_baseline import configured_choice
from supertuner.plan.forecast.timing import ExpertSteps
from supertuner.plan.placement.overrides import apply_plan_settings
from supertuner.plan.placement.plan import MemoryPlan, PlanEstimate
from supertuner.plan.placement.plan_step import evaluate_plan, plan_step
from supertuner.plan.placement.planner import RunPlanner
from supertuner.plan.placement.roofline import step_time_bound
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits
from supertuner.plan.trace.execution_trace import ExecutionTrace, TensorKind
from supertuner.plan.trace.inference_phases import SampleTrace
from supertuner.plan.trace.step_table_builder import build_step_table
from supertuner.step.expert_setup import selected_experts
from supertuner.train.offload.optimizer_step import PER_PARAMETER_OPTIMIZERS

SHAPES_TRACED = 3
"""Sizes of batches that are traced for their time; the others lie between them."""
SAME_SIZE_TOLERANCE = 0.05
"""Sizes that differ by less are taken for one."""
RESIDENT_KINDS = (TensorKind.FROZEN, TensorKind.TRAINED, TensorKind.STATE)


class TraceProvider(Protocol):
    """Who traces the phases of a configured run."""

    @property
    def family(self) -> Family: ...
    @property
    def model(self) -> ModelDescription: ...
    def tokens_per_sample(self, bucket: Bucket) -> int:
        """Of one sample."""

    def is_convolutional(self, expert: Expert) -> bool:
        """Whether much of it is convolutions, whose workspaces nobody knows without the GPU."""

    def training_trace(
        self, expert: Expert, bucket: Bucket, checkpointing: bool, micro_batches: int = 1
    ) -> ExecutionTrace: ...
    def media_trace(self, bucket: Bucket) -> ExecutionTrace:
        """Of encoding one sample."""

    def text_trace(self) -> ExecutionTrace:
        """Of encoding one caption."""

    def sampling_trace(self, bucket: Bucket) -> SampleTrace:
        """Of one sample, with all that is on the GPU for it."""

    def encoded_sizes(self) -> EncodedSizes: ...


@dataclass(frozen=True, eq=False, slots=True)
class ExpertForecast:
    """What is known of one expert's training."""

    expert: Expert
    trace: ExecutionTrace
    """As configured, at the shape that needs the most."""
    steps: ExpertSteps

    @property
    def phase(self) -> str:
        return f"train {self.expert.name}"

    @property
    def resident_bytes(self) -> int:
        """Weights and state: what it takes while it waits."""
        at = self.trace.live_bytes_by_kind(0)
        return sum(at[kind] for kind in RESIDENT_KINDS)


class RunModel:
    """Everything that is worked out once, and used for memory, time and advice alike."""

    def __init__(
        self, config: RunConfig, capacity: MachineCapacity, traces: TraceProvider, datasets: tuple[DatasetSize, ...]
    ) -> None:
        capacity = replace(capacity, has_overflow=config.memory.overflow.enabled and not capacity.one_pool)
        self.config, self.capacity, self.traces, self.datasets = config, capacity, traces, datasets
        self.buckets = holdings.bucket_draw_shares(datasets)
        _require_supported_buckets(traces, self.buckets)
        self.schedule: TrainingSchedule | None = holdings.forecast_schedule(config, datasets)
        self.largest_bucket = max(self.buckets, key=lambda bucket: (traces.tokens_per_sample(bucket), bucket))
        self.rates = MachineRates.from_machine(capacity.machine, config.train.mixed_precision)
        self.micro_batches = duration.largest_window_micro_batches(config, self.schedule)
        self.encoder_bytes = self._resident_encoder_bytes()
        self.experts = self._forecast_experts()
        self.storage = self._list_storage()
        self.plans = self._make_plans()
        if self.follows_plans:
            self.experts = tuple(self._with_plan(one) for one in self.experts)

    @property
    def follows_plans(self) -> bool:
        """Whether the run follows plans: on a GPU, unless it was told not to."""
        return self.config.plan.act == "auto" and not self.capacity.on_cpu

    @property
    def has_known_rates(self) -> bool:
        """Whether the machine's figures are known."""
        return not self.rates.unknown_rates

    @property
    def limits(self) -> MemoryLimits | None:
        """What a plan may use: not the last of the GPU's memory, which a driver and gaps between tensors need; nor the
        last of the host's, nor what caches and staged files have of it."""
        if self.capacity.gpu_bytes is None:
            return None
        stored_bytes, host = total_storage(self.storage, "memory")[0], self.capacity.host_bytes
        gpu = int(self.capacity.gpu_bytes * TIGHT_SHARE) - self.encoder_bytes
        return MemoryLimits(max(0, gpu), None if host is None else max(0, int(host * HOST_SHARE) - stored_bytes))

    def _forecast_experts(self) -> tuple[ExpertForecast, ...]:
        experts = selected_experts(self.config, self.traces.model)
        traces = {expert.name: self._configured_trace(expert) for expert in experts}
        resident_bytes = {
            name: sum(trace.live_bytes_by_kind(0)[kind] for kind in RESIDENT_KINDS) for name, trace in traces.items()
        }
        forecasts = []
        for expert in experts:
            idle = sum(nbytes for name, nbytes in resident_bytes.items() if name != expert.name)
            forecasts.append(ExpertForecast(expert, traces[expert.name], self._expert_steps(expert, idle)))
        return tuple(forecasts)

    def _configured_trace(self, expert: Expert) -> ExecutionTrace:
        """The second micro-batch of a window finds the gradients of the first. Those of an adapter are small, and are
        added; of whole weights they are not, and two micro-batches are traced."""
        checkpointing = self.config.train.gradient_checkpointing
        traces_two = self.micro_batches > 1 and self.config.adapter.type in ("full", "diff")
        return self.traces.training_trace(expert, self.largest_bucket, checkpointing, 2 if traces_two else 1)

    def _expert_steps(self, expert: Expert, idle: int) -> ExpertSteps:
        def table(bucket: Bucket) -> StepTable:
            trace = self.traces.training_trace(expert, bucket, False)
            found = build_step_table(trace, micro_batches=self.micro_batches, idle_bytes=idle)
            return replace(found, by_pieces=self.config.optimizer.name in PER_PARAMETER_OPTIMIZERS)

        largest = table(self.largest_bucket)
        others = (
            {self.traces.tokens_per_sample(one): table(one) for one in self._other_size_buckets()}
            if self.has_known_rates
            else {}
        )
        choice = configured_choice(largest, self.config.train.gradient_checkpointing)
        return ExpertSteps(largest, choice, None, self.traces.tokens_per_sample(self.largest_bucket), others)

    def _other_size_buckets(self) -> list[Bucket]:
        """Buckets of other sizes whose time is worth a trace: the smallest, and one in the middle."""
        largest_tokens = self.traces.tokens_per_sample(self.largest_bucket)
        sizes: dict[int, Bucket] = {}
        for bucket in self.buckets:
            tokens = self.traces.tokens_per_sample(bucket)
            if all(abs(tokens - other) > SAME_SIZE_TOLERANCE * other for other in (*sizes, largest_tokens)):
                sizes[tokens] = bucket
        ordered = [sizes[tokens] for tokens in sorted(sizes)]
        return ordered if len(ordered) < SHAPES_TRACED else [ordered[0], ordered[len(ordered) // 2]]

    def _resident_encoder_bytes(self) -> int:
        """Where samples are encoded when they are used, or anew for each epoch, encoders stay beside training."""
        encoded_kinds = {what for one in self.datasets for what in one.encoded_while_training}
        traces = [self.traces.media_trace(self.largest_bucket)] if "media" in encoded_kinds else []
        traces += [self.traces.text_trace()] if "text" in encoded_kinds else []
        return sum(trace.live_bytes_by_kind(0)[TensorKind.FROZEN] for trace in traces)

    def _list_storage(self) -> tuple[StorageItem, ...]:
        trained = tuple(self._state_sizes(one) for one in self.experts)
        batch = self.experts[0].steps.table.batch_bytes
        return list_storage(self.config, self.datasets, self.traces.encoded_sizes(), trained, batch)

    def _state_sizes(self, expert_forecast: ExpertForecast) -> ExpertStateSizes:
        at = expert_forecast.trace.live_bytes_by_kind(0)
        parameters = at[TensorKind.TRAINED]
        full = adapters.settings_for_expert(self.config.adapter, expert_forecast.expert.name).type == "full"
        halved = full and self.config.train.mixed_precision != "fp32"
        return ExpertStateSizes(
            expert_forecast.expert.name, parameters, at[TensorKind.STATE], parameters // 2 if halved else parameters
        )

    def _make_plans(self) -> Mapping[str, MemoryPlan]:
        """Experts with the same step have the same plan."""
        limits = self.limits
        if limits is None:
            return {}
        plan_by_table: dict[StepTable, MemoryPlan] = {}
        plans = {}
        for one in self.experts:
            table = replace(one.steps.table, phase="")
            if table not in plan_by_table:
                plan_by_table[table] = plan_step(table, self.capacity.machine, limits, rates=self.rates)
            plans[one.phase] = replace(plan_by_table[table], phase=one.phase)
        self._plans_before_settings: dict[str, MemoryPlan] = plans
        if not self.config.plan.explicit_choices and self.config.plan.ahead is None:
            return plans
        return {one.phase: self._apply_plan_settings(one, plans[one.phase], limits) for one in self.experts}

    def _with_plan(self, expert_forecast: ExpertForecast) -> ExpertForecast:
        plan = self.plans.get(expert_forecast.phase)
        return replace(
            expert_forecast, steps=replace(expert_forecast.steps, plan=plan if plan is not None and plan.fits else None)
        )

    def _apply_plan_settings(
        self, expert_forecast: ExpertForecast, plan: MemoryPlan, limits: MemoryLimits
    ) -> MemoryPlan:
        """The plan with what the settings ask for instead, and what it then needs and takes."""
        table, settings = expert_forecast.steps.table, self.config.plan
        blocks = [block.name for block in table.blocks if block.recomputable]
        recompute = self.config.train.gradient_checkpointing
        configured_plan = (
            apply_plan_settings(settings, plan, blocks, phase=expert_forecast.phase, recompute=recompute) or plan
        )
        if configured_plan.modelled is plan.modelled or not self.has_known_rates:
            return configured_plan
        evaluation = evaluate_plan(table, configured_plan, self.capacity.machine, limits, self.rates)
        time_bound = step_time_bound(table, self.rates, limits)
        plan_estimate = PlanEstimate(
            evaluation.seconds,
            time_bound.seconds,
            time_bound.limited_by,
            evaluation.needs.gpu_bytes,
            evaluation.needs.host_bytes,
        )
        return replace(configured_plan, fits=evaluation.simulated is not None, modelled=plan_estimate)

    def build_planner(self) -> RunPlanner | None:
        """What a run that follows plans is given; None: it follows none."""
        limits = self.limits
        if not self.follows_plans or limits is None:
            return None
        return RunPlanner(
            machine=self.capacity.machine,
            limits=limits,
            rates=self.rates,
            batch_size=self.config.train.batch_size,
            tables={one.expert.name: one.steps.table for one in self.experts},
            plans={one.expert.name: self._plans_before_settings[one.phase] for one in self.experts},
        )


def _require_supported_buckets(traces: TraceProvider, buckets: Mapping[Bucket, float | None]) -> None:
    """What training would refuse is refused here too, in the same words."""
    for bucket in buckets:
        reason = traces.family.unsupported_reason(traces.model, bucket.shape)
        if reason is not None:
            raise ModelError(f"bucket {bucket.label}: {reason}; change bucket_step, resolution or frames")
