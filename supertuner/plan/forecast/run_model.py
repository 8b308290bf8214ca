"""A configured run on a machine before it starts: the shapes of its samples, its traced steps, its plans, its storage.

A `CachedTraceProvider` supplies the traces, made now or read from a cache. Nothing is loaded, staged or written here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import ModelError
from supertuner.data.ordering.buckets import Bucket
from supertuner.models.adapters import attach as adapters
from supertuner.models.spec import Expert
from supertuner.optim.schedule import TrainingSchedule
from supertuner.plan.forecast import dataset_sizes, duration
from supertuner.plan.forecast.dataset_sizes import DatasetSize
from supertuner.plan.forecast.results import HOST_SHARE, TIGHT_SHARE, MachineCapacity
from supertuner.plan.forecast.storage import ExpertStateSizes, StorageItem, list_storage, total_storage
from supertuner.plan.forecast.suggestion_baseline import configured_choice
from supertuner.plan.forecast.timing import ExpertSteps
from supertuner.plan.forecast.trace_provider import CachedTraceProvider
from supertuner.plan.placement.make_plan import make_plan
from supertuner.plan.placement.memory_needs import PER_PARAMETER_OPTIMIZERS
from supertuner.plan.placement.plan import MemoryPlan
from supertuner.plan.placement.run_plans import RunPlanner, plan_settings_on_machine
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits
from supertuner.plan.trace.execution_trace import ExecutionTrace, TensorKind
from supertuner.plan.trace.planned_allocation import TracedStep
from supertuner.plan.trace.step_table_builder import build_step_table
from supertuner.step.expert_setup import selected_experts

SHAPES_TRACED = 3
"""Batch shapes that are traced for their time, at most; the times of the others are interpolated."""
SAME_SIZE_TOLERANCE = 0.05
"""Two shapes whose token counts differ by less than this share count as one."""
RESIDENT_KINDS = (TensorKind.FROZEN, TensorKind.TRAINED, TensorKind.STATE)


@dataclass(frozen=True, eq=False, slots=True)
class ExpertForecast:
    """The traced and timed training of one expert."""

    expert: Expert
    trace: ExecutionTrace
    """As configured, at the shape that needs the most memory."""
    traced_step: TracedStep
    """The same without recomputation: what a plan is made from."""
    steps: ExpertSteps

    @property
    def phase(self) -> str:
        return f"train {self.expert.name}"


def fullest_expert(experts: Sequence[ExpertForecast]) -> ExpertForecast:
    """The expert whose step needs the most memory with everything on the GPU."""
    return max(experts, key=lambda one: one.trace.peak()[0])


class RunModel:
    """What memory, time and suggestions of a forecast are all derived from; computed once."""

    def __init__(
        self, config: RunConfig, capacity: MachineCapacity, traces: CachedTraceProvider, datasets: Sequence[DatasetSize]
    ) -> None:
        capacity = replace(capacity, has_overflow=config.memory.overflow.enabled and not capacity.one_pool)
        self.config, self.capacity, self.traces, self.datasets = config, capacity, traces, datasets
        self.buckets = dataset_sizes.bucket_draw_shares(datasets)
        _require_supported_buckets(traces, self.buckets)
        self.schedule: TrainingSchedule | None = dataset_sizes.forecast_schedule(config, datasets)
        self.largest_bucket = max(self.buckets, key=lambda bucket: (traces.tokens_per_sample(bucket), bucket))
        self.rates = MachineRates.from_machine(capacity.machine, config.train.mixed_precision)
        self.micro_batches = duration.largest_window_micro_batches(config, self.schedule)
        self.encoder_bytes = self._resident_encoder_bytes()
        self.experts = self._forecast_experts()
        self.storage = self._list_storage()
        planner = self._build_planner()
        self.plans: Mapping[str, MemoryPlan] = (
            {} if planner is None else {one.phase: planner.forecast_plan(one.expert.name) for one in self.experts}
        )
        """By phase: the best plan, whether the run follows it or not."""
        self.planner = planner if self.follows_plans else None
        """The source of the trainer's plans; None: the run follows none."""
        if self.follows_plans:
            self.experts = tuple(self._with_plan(one) for one in self.experts)

    @property
    def follows_plans(self) -> bool:
        """Whether the run follows plans: on a GPU, unless `plan.act` is "never"."""
        return self.config.plan.act == "auto" and not self.capacity.on_cpu

    @property
    def has_known_rates(self) -> bool:
        """Whether the rates that times are modelled from are known."""
        return not self.rates.unknown_rates

    @property
    def limits(self) -> MemoryLimits | None:
        """The memory that a plan may use; None: the size of GPU memory is unknown.

        5 % of GPU memory are left for the driver, 10 % of host memory for other programs; caches and staged files in
        host memory are subtracted. On a one-pool machine they are in the memory of the GPU.
        """
        if self.capacity.gpu_limit_bytes is None:
            return None
        stored_bytes, host = total_storage(self.storage, "memory")[0], self.capacity.host_bytes
        gpu = int(self.capacity.gpu_limit_bytes * TIGHT_SHARE) - self.encoder_bytes - self.stored_bytes_in_pool
        return MemoryLimits(max(0, gpu), None if host is None else max(0, int(host * HOST_SHARE) - stored_bytes))

    @property
    def stored_bytes_in_pool(self) -> int:
        """Host memory of caches and staged files that comes out of the GPU's memory: all of it on a one-pool
        machine."""
        return total_storage(self.storage, "memory")[0] if self.capacity.one_pool else 0

    def _forecast_experts(self) -> tuple[ExpertForecast, ...]:
        experts = selected_experts(self.config, self.traces.model)
        traces = {expert.name: self._configured_trace(expert) for expert in experts}
        resident_bytes = {name: _resident_bytes(trace) for name, trace in traces.items()}
        idle_bytes = {name: sum(resident_bytes.values()) - nbytes for name, nbytes in resident_bytes.items()}
        steps = {expert.name: self._expert_steps(expert, idle_bytes[expert.name]) for expert in experts}
        return tuple(
            ExpertForecast(
                expert, traces[expert.name], self._traced_step(expert, steps[expert.name].table), steps[expert.name]
            )
            for expert in experts
        )

    def _traced_step(self, expert: Expert, table: StepTable) -> TracedStep:
        return TracedStep(self.traces.training_trace(expert, self.largest_bucket, False), table)

    def _configured_trace(self, expert: Expert) -> ExecutionTrace:
        """The trace of a window with the configured checkpointing.

        From the second micro-batch on, gradients of earlier ones are in memory. Gradients of an adapter are small and
        are added afterwards (`phase_memory.py`); for gradients of whole weights, two micro-batches are traced.
        """
        checkpointing = self.config.train.gradient_checkpointing
        traces_two = self.micro_batches > 1 and self.config.adapter.type in ("full", "diff")
        return self.traces.training_trace(expert, self.largest_bucket, checkpointing, 2 if traces_two else 1)

    def _expert_steps(self, expert: Expert, idle: int) -> ExpertSteps:
        def table(bucket: Bucket) -> StepTable:
            trace = self.traces.training_trace(expert, bucket, False)
            built = build_step_table(trace, micro_batches=self.micro_batches, idle_bytes=idle)
            return replace(built, by_pieces=self.config.optimizer.name in PER_PARAMETER_OPTIMIZERS)

        largest = table(self.largest_bucket)
        other_buckets = self._other_size_buckets() if self.has_known_rates else []
        others = {self.traces.tokens_per_sample(bucket): table(bucket) for bucket in other_buckets}
        choice = configured_choice(largest, self.config.train.gradient_checkpointing)
        return ExpertSteps(largest, choice, None, self.traces.tokens_per_sample(self.largest_bucket), others)

    def _other_size_buckets(self) -> list[Bucket]:
        """Buckets of other sizes to trace for their time: all if there are few, else the smallest and a middle one."""
        largest_tokens = self.traces.tokens_per_sample(self.largest_bucket)
        sizes: dict[int, Bucket] = {}
        for bucket in self.buckets:
            tokens = self.traces.tokens_per_sample(bucket)
            if all(abs(tokens - other) > SAME_SIZE_TOLERANCE * other for other in (*sizes, largest_tokens)):
                sizes[tokens] = bucket
        ordered = [sizes[tokens] for tokens in sorted(sizes)]
        return ordered if len(ordered) < SHAPES_TRACED else [ordered[0], ordered[len(ordered) // 2]]

    def _resident_encoder_bytes(self) -> int:
        """Encoders that stay on the GPU during training: of samples that are encoded on the fly or for each epoch."""
        encoded_kinds = {kind for dataset in self.datasets for kind in dataset.encoded_while_training}
        traces = [self.traces.media_trace(self.largest_bucket)] if "media" in encoded_kinds else []
        traces += [self.traces.text_trace()] if "text" in encoded_kinds else []
        return sum(trace.live_bytes_by_kind(0)[TensorKind.FROZEN] for trace in traces)

    def _list_storage(self) -> tuple[StorageItem, ...]:
        trained = tuple(self._state_sizes(one.expert.name, one.trace) for one in self.experts)
        batch = self.experts[0].steps.table.batch_bytes
        steps = None if self.schedule is None else self.schedule.total_steps
        return list_storage(self.config, self.datasets, self.traces.encoded_sizes(), trained, batch, steps)

    def _state_sizes(self, name: str, trace: ExecutionTrace) -> ExpertStateSizes:
        live_bytes = trace.live_bytes_by_kind(0)
        parameters, state = live_bytes[TensorKind.TRAINED], live_bytes[TensorKind.STATE]
        full = adapters.settings_for_expert(self.config.adapter, name).type == "full"
        halved = full and self.config.train.mixed_precision != "fp32"  # fp32 weights are exported in 16 bits
        return ExpertStateSizes(parameters, state, parameters // 2 if halved else parameters)

    def _build_planner(self) -> RunPlanner | None:
        """Searches the plans. Experts with equal steps share one search. None: the size of GPU memory is unknown."""
        limits = self.limits
        if limits is None:
            return None
        plan_by_table: dict[StepTable, MemoryPlan] = {}
        plans = {}
        for one in self.experts:
            table = replace(one.steps.table, phase="")
            if table not in plan_by_table:
                model = one.traced_step.reserved_bytes
                plan_by_table[table] = make_plan(
                    table, self.capacity.machine, limits, rates=self.rates, reserved_bytes=model
                )
            plans[one.expert.name] = replace(plan_by_table[table], phase=one.phase)
        return RunPlanner(
            machine=self.capacity.machine,
            limits=limits,
            rates=self.rates,
            settings=plan_settings_on_machine(self.config.plan, self.capacity.one_pool)[0],
            batch_size=self.config.train.batch_size,
            tables={one.expert.name: one.steps.table for one in self.experts},
            searched_plans=plans,
            reserved_models={one.expert.name: one.traced_step.reserved_bytes for one in self.experts},
        )

    def _with_plan(self, training: ExpertForecast) -> ExpertForecast:
        plan = self.plans.get(training.phase)
        followed = plan if plan is not None and plan.fits else None
        return replace(training, steps=replace(training.steps, plan=followed))


def _resident_bytes(trace: ExecutionTrace) -> int:
    live_bytes = trace.live_bytes_by_kind(0)
    return sum(live_bytes[kind] for kind in RESIDENT_KINDS)


def _require_supported_buckets(traces: CachedTraceProvider, buckets: Iterable[Bucket]) -> None:
    """Raise the ModelError that training would raise for a bucket that the model cannot process."""
    for bucket in buckets:
        if (reason := traces.family.unsupported_reason(traces.model, bucket.shape)) is not None:
            raise ModelError(f"bucket {bucket.label}: {reason}; change bucket_step, resolution or frames")
