"""A configuration becomes a forecast: what is known of the run, its phases, its time, and what would be better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from supertuner.config.settings.run_config import RunConfig
from supertuner.data.ordering.buckets import Bucket
from supertuner.plan.forecast import duration
from supertuner.plan.forecast.dataset_sizes import DatasetSize
from supertuner.plan.forecast.phase_memory import forecast_phases, validation_bucket
from supertuner.plan.forecast.results import MachineCapacity, PhaseForecast, RunForecast, RunTiming, SuggestedChange
from supertuner.plan.forecast.run_model import ExpertForecast, RunModel, TraceProvider
from supertuner.plan.forecast.storage import total_storage
from supertuner.plan.forecast.suggestion_baseline import SuggestionBaseline
from supertuner.plan.forecast.suggestions import suggest_changes
from supertuner.plan.forecast.timing import RepeatedWork, RunWork, forecast_timing
from supertuner.plan.placement.planner import RunPlanner

ASSUMED_COMPUTE_SHARE = 0.4
"""Of the published peaks, for a second column of times: 400 of a GH200's 990 TFLOPS. An assumption, not a measurement;
`--compute-share` says another."""
LAUNCH_S = 5e-6
"""About what it takes to start an operator on a GPU; only to say so where it decides."""


@dataclass(frozen=True, eq=False, slots=True)
class RunEstimate:
    """A forecast, and what pictures of it are drawn from."""

    forecast: RunForecast
    experts: tuple[ExpertForecast, ...]
    bucket: Bucket
    """The shape that needs the most."""
    planner: RunPlanner | None
    """What a run is given to follow its plans; None: it follows none."""

    def fullest_expert(self) -> ExpertForecast:
        return max(self.experts, key=lambda one: one.trace.peak()[0])

    def idle_bytes(self, trained_expert: ExpertForecast) -> int:
        """Of the experts that wait while this one is trained."""
        return sum(one.resident_bytes for one in self.experts if one is not trained_expert)


def forecast_run(
    config: RunConfig,
    capacity: MachineCapacity,
    traces: TraceProvider,
    datasets: Sequence[DatasetSize],
    *,
    compute_share: float | None = None,
    advise: bool = True,
) -> RunEstimate:
    """Everything about a run on a machine. `advise`: also what single changes would do."""
    run = RunModel(config, capacity, traces, tuple(datasets))
    run_timing, why = _forecast_timing(run, compute_share)
    phases_at_peak = forecast_phases(run)
    forecast = RunForecast(
        model=traces.model.title,
        settings=settings_text(config, run.largest_bucket, run.micro_batches),
        capacity=run.capacity,
        phases=phases_at_peak,
        stored=run.storage,
        timing=run_timing,
        why_no_timing=why,
        changes=_suggest_changes(run, phases_at_peak) if advise else (),
        plans=run.plans,
        notes=tuple(_notes(run)),
    )
    return RunEstimate(forecast, run.experts, run.largest_bucket, run.build_planner())


def settings_text(config: RunConfig, bucket: Bucket, micro_batches: int) -> str:
    """What is trained and how, in a line."""
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
    return forecast_timing(run_work, run.capacity.machine, run.limits, run.rates, (1.0, share)), ""


def _token_shares(run: RunModel) -> dict[int, float]:
    """Where shares are not known, everything is taken to be as large as the largest."""
    shares: dict[int, float] = {}
    for bucket, share in run.buckets.items():
        if share is None:
            return {run.traces.tokens_per_sample(run.largest_bucket): 1.0}
        tokens = run.traces.tokens_per_sample(bucket)
        shares[tokens] = shares.get(tokens, 0.0) + share
    return shares


def _encoding_work(run: RunModel) -> tuple[RepeatedWork, ...] | None:
    """Every sample in every variation, in proportion to its volume; every caption."""
    volume, captions = 0.0, 0
    for dataset in run.datasets:
        if dataset.samples is None or dataset.captions is None:
            return None
        volume += dataset.cached_media_variants * sum(
            filled.samples * prod(filled.bucket.shape) for filled in dataset.bucket_counts
        )
        captions += dataset.cached_text_variants * dataset.captions.count
    media, text = run.traces.media_trace(run.largest_bucket), run.traces.text_trace()
    return RepeatedWork.from_trace(media, volume / prod(run.largest_bucket.shape)), RepeatedWork.from_trace(
        text, captions
    )


def _sampling_work(run: RunModel) -> tuple[RepeatedWork, ...] | None:
    if run.schedule is None:
        return None
    settings = run.config.validation
    count = duration.validation_count(settings, run.schedule.total_steps) * duration.samples_per_validation(settings)
    if not count:
        return ()
    work = run.traces.sampling_trace(validation_bucket(run)).total_work(settings.inference_steps)
    return (RepeatedWork((work,), count),)


# ── advice ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _suggest_changes(run: RunModel, phase_forecasts: Sequence[PhaseForecast]) -> tuple[SuggestedChange, ...]:
    """About the expert whose training needs the most."""
    fullest_expert = max(run.experts, key=lambda one: one.trace.peak()[0])
    training_phase = next(phase for phase in phase_forecasts if phase.name == fullest_expert.phase)
    baseline = SuggestionBaseline(
        config=run.config,
        capacity=run.capacity,
        rates=run.rates if run.has_known_rates else None,
        table=fullest_expert.steps.table,
        choice=fullest_expert.steps.choice,
        peak_bytes=training_phase.all_on_gpu_bytes,
        other_phases_bytes=max(
            (one.gpu_bytes for one in phase_forecasts if not one.name.startswith("train ")), default=0
        ),
        host_bytes=total_storage(run.storage, "memory")[0],
        plan=run.plans.get(fullest_expert.phase),
        follows_plans=run.follows_plans,
        limits=run.limits,
    )
    return suggest_changes(baseline)


def _notes(run: RunModel) -> list[str]:
    notes = []
    if run.config.parallel.strategy == "fsdp":
        notes.append('all of it is of one process that has all weights; parallel.strategy "fsdp" is not forecast')
    return notes + _small_step_notes(run)


def _small_step_notes(run: RunModel) -> list[str]:
    if not run.has_known_rates:
        return []
    works = [stretch.work for stretch in run.experts[0].trace.spans]
    launched = LAUNCH_S * sum(work.operators for work in works)
    if sum(map(run.rates.seconds, works)) >= launched:
        return []
    return ["a step this small is mostly launching operators, which is not in its time"]
