"""From a configuration and a machine to a forecast or to plans: one call each. Nothing is loaded, staged or started.

`estimate_run` returns memory, storage, time and suggestions; `plan_run` returns only the plans. Both trace the run's
steps on fake tensors; the traces are cached below `run.output_dir`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import NullSink, Progress, Sink
from supertuner.data.ordering.buckets import Bucket
from supertuner.memory.machines import ONE_POOL_SHARE
from supertuner.plan.forecast import duration
from supertuner.plan.forecast.dataset_sizes import DatasetSize
from supertuner.plan.forecast.phase_memory import forecast_phases, validation_bucket
from supertuner.plan.forecast.results import (
    ASSUMED_COMPUTE_SHARE,
    EstimateOptions,
    MachineCapacity,
    PhaseForecast,
    RunForecast,
    RunTiming,
    SuggestedChange,
)
from supertuner.plan.forecast.run_model import ExpertForecast, RunModel, fullest_expert
from supertuner.plan.forecast.storage import total_storage
from supertuner.plan.forecast.suggestion_baseline import SuggestionBaseline
from supertuner.plan.forecast.suggestions import suggest_changes
from supertuner.plan.forecast.survey import survey_datasets
from supertuner.plan.forecast.timeline import MemoryTimeline, build_timeline
from supertuner.plan.forecast.timing import RepeatedWork, RunWork, forecast_timing
from supertuner.plan.forecast.trace_provider import CachedTraceProvider
from supertuner.plan.placement.plan import MemoryPlan
from supertuner.plan.placement.run_plans import ONE_POOL_REASON, RunPlanner, plan_settings_on_machine
from supertuner.plan.placement.throughput import MachineRates
from supertuner.plan.trace.inference_phases import sample_work
from supertuner.plan.trace.loading_phase import LOADING

LAUNCH_S = 5e-6
"""Approximate time to launch an operator on a GPU; used only to note where launches dominate."""


@dataclass(frozen=True, eq=False, slots=True)
class RunEstimate:
    """A forecast, and the traced steps that it was derived from."""

    forecast: RunForecast
    experts: tuple[ExpertForecast, ...]
    bucket: Bucket
    """The shape that needs the most memory."""
    planner: RunPlanner | None
    """The source of the trainer's plans; None: the run follows none."""

    def fullest_expert(self) -> ExpertForecast:
        return fullest_expert(self.experts)

    def memory_timeline(self) -> MemoryTimeline:
        """The memory of the fullest expert's step over time, with everything on the GPU."""
        expert = self.fullest_expert()
        rates = MachineRates.from_machine(self.forecast.capacity.machine)
        seconds_of = None if rates.unknown_rates else rates.seconds
        return build_timeline(expert.trace, seconds_of, expert.steps.table.idle_bytes)


def estimate_run(
    config: RunConfig,
    capacity: MachineCapacity,
    options: EstimateOptions | None = None,
    sink: Sink | None = None,
    progress: Progress | None = None,
    datasets: Sequence[DatasetSize] | None = None,
) -> RunEstimate:
    """The forecast of a run on a machine (`target_machine.find_machine_capacity`).

    `datasets`: their survey (`survey_datasets`), if it is known; `options.samples` is then not read.
    Raises ModelError if the model is unknown before it is downloaded, or cannot process a bucket.
    """
    options = options or EstimateOptions()
    if datasets is None:
        datasets = survey_datasets(config, options.samples)
    return forecast_run(_build_run_model(config, capacity, datasets, sink, progress), options)


def plan_run(
    config: RunConfig,
    capacity: MachineCapacity,
    samples: int | None = None,
    sink: Sink | None = None,
    progress: Progress | None = None,
) -> Mapping[str, MemoryPlan]:
    """The plan of each training phase (`train <expert>`) on a machine, with `plan.*` settings applied.

    Empty if the size of GPU memory is unknown. `samples` and errors as in `estimate_run`.
    """
    return _build_run_model(config, capacity, survey_datasets(config, samples), sink, progress).plans


def _build_run_model(
    config: RunConfig,
    capacity: MachineCapacity,
    datasets: Sequence[DatasetSize],
    sink: Sink | None,
    progress: Progress | None,
) -> RunModel:
    silent = NullSink()
    traces = CachedTraceProvider(config, capacity, sink or silent, progress or silent)
    return RunModel(config, capacity, traces, datasets)


def forecast_run(run: RunModel, options: EstimateOptions) -> RunEstimate:
    """Memory, storage, time and suggestions of a traced run. `options.samples` is not read: `run` has the datasets."""
    config = run.config
    timing, why_no_timing = _forecast_timing(run, options.compute_share)
    phases = forecast_phases(run)
    forecast = RunForecast(
        model=run.traces.model.title,
        settings=settings_text(config, run.largest_bucket, run.micro_batches),
        capacity=run.capacity,
        phases=phases,
        stored=run.storage,
        timing=timing,
        why_no_timing=why_no_timing,
        changes=_suggest_changes(run, phases) if options.advise else (),
        plans=run.plans,
        notes=tuple(_notes(run)),
    )
    return RunEstimate(forecast, run.experts, run.largest_bucket, run.planner)


def settings_text(config: RunConfig, bucket: Bucket, micro_batches: int) -> str:
    """What is trained and how, in one line."""
    adapter, train = config.adapter, config.train
    what = "all weights" if adapter.type == "full" else f"{adapter.type} of rank {adapter.rank} on {adapter.targets}"
    parts = [
        what,
        train.mixed_precision,
        f"{train.batch_size} × {micro_batches} of {bucket.label}",
        "checkpointing" if train.gradient_checkpointing else "activations kept",
        config.optimizer.name,
    ]
    if config.model.base_weights != "as_computed":
        parts.append(f"base weights in {config.model.base_weights}")
    return ", ".join(parts)


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _forecast_timing(run: RunModel, compute_share: float | None) -> tuple[RunTiming | None, str]:
    """The times, or None and the reason why there are none."""
    if not run.has_known_rates:
        missing = ", ".join(run.rates.unknown_rates)
        return None, f"{missing} of {run.capacity.title} is not known, so no time is modelled"
    unknown = [f"datasets[{one.id}]: {one.explanation}" for one in run.datasets if one.samples is None]
    run_work = RunWork(
        experts=tuple(one.steps for one in run.experts),
        token_shares=_token_shares(run),
        schedule=run.schedule,
        batch_size=run.config.train.batch_size,
        encoding=_encoding_work(run),
        sampling=_sampling_work(run),
        switch_every=run.config.model.switch_boundary_every,
        left_out=(*unknown, "reading and decoding files, loading weights, writing checkpoints"),
    )
    share = ASSUMED_COMPUTE_SHARE if compute_share is None else compute_share
    return forecast_timing(run_work, run.limits, run.rates, (1.0, share)), ""


def _token_shares(run: RunModel) -> dict[int, float]:
    """Tokens of a sample → share of the draws. If the shares are unknown, all samples count as the largest."""
    shares: dict[int, float] = {}
    for bucket, share in run.buckets.items():
        if share is None:
            return {run.traces.tokens_per_sample(run.largest_bucket): 1.0}
        tokens = run.traces.tokens_per_sample(bucket)
        shares[tokens] = shares.get(tokens, 0.0) + share
    return shares


def _encoding_work(run: RunModel) -> tuple[RepeatedWork, ...] | None:
    """Encoding every variation of every sample, in proportion to its volume, and every caption; None: unknown
    counts."""
    volume, captions = 0.0, 0
    for dataset in run.datasets:
        if dataset.samples is None or dataset.captions is None:
            return None
        pixels = sum(one.samples * prod(one.bucket.shape) for one in dataset.bucket_counts)
        volume += dataset.cached_media_variants * pixels
        captions += dataset.cached_text_variants * dataset.captions.count
    samples = volume / prod(run.largest_bucket.shape)
    media = RepeatedWork.from_trace(run.traces.media_trace(run.largest_bucket), samples)
    return media, RepeatedWork.from_trace(run.traces.text_trace(), captions)


def _sampling_work(run: RunModel) -> tuple[RepeatedWork, ...] | None:
    if run.schedule is None:
        return None
    settings = run.config.validation
    count = duration.validation_count(settings, run.schedule.total_steps) * duration.samples_per_validation(settings)
    if not count:
        return ()
    work = sample_work(run.traces.sampling_trace(validation_bucket(run)), settings.inference_steps)
    return (RepeatedWork((work,), count),)


# ── suggestions ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _suggest_changes(run: RunModel, phases: Sequence[PhaseForecast]) -> tuple[SuggestedChange, ...]:
    """Changes for the expert whose training needs the most memory."""
    fullest = fullest_expert(run.experts)
    training_phase = next(phase for phase in phases if phase.name == fullest.phase)
    plan = run.plans.get(fullest.phase)
    baseline = SuggestionBaseline(
        config=run.config,
        experts=tuple(one.expert.name for one in run.experts),
        capacity=run.capacity,
        rates=run.rates if run.has_known_rates else None,
        table=fullest.steps.table,
        choice=fullest.steps.choice,
        peak_bytes=training_phase.all_on_gpu_bytes,
        # Loading never needs more than training, and a change that shrinks one shrinks the other.
        other_phases_bytes=max(
            (one.gpu_bytes for one in phases if not one.name.startswith(("train ", LOADING))), default=0
        ),
        host_bytes=total_storage(run.storage, "memory")[0],
        plan=plan,
        follows_plans=run.follows_plans,
        limits=run.limits,
        plan_gap_bytes=0 if plan is None or plan.modelled is None else plan.modelled.gap_bytes,
    )
    return suggest_changes(baseline)


def _notes(run: RunModel) -> list[str]:
    notes = []
    if run.config.parallel.strategy == "fsdp":
        notes.append('all figures are for one process that holds all weights; parallel.strategy "fsdp" is not forecast')
    if run.capacity.one_pool:
        notes += _one_pool_notes(run)
    works = [span.work for span in run.experts[0].trace.spans]
    launch_s = LAUNCH_S * sum(work.operators for work in works)
    if run.has_known_rates and sum(map(run.rates.seconds, works)) < launch_s:
        notes.append("a step this small mostly launches operators; the modelled time does not include the launches")
    return notes


def _one_pool_notes(run: RunModel) -> list[str]:
    """What is different where CPU and GPU share one memory, and the settings that have no effect there."""
    kept = 1.0 - ONE_POOL_SHARE
    notes = [
        f"one pool: host memory and GPU memory add up; {kept:.0%} stay free, because a full pool stops the machine"
    ]
    notes += plan_settings_on_machine(run.config.plan, one_pool=True)[1]
    if run.config.parallel.cpu_offload:
        notes.append(f"training refuses parallel.cpu_offload: true here: {ONE_POOL_REASON}")
    return notes
