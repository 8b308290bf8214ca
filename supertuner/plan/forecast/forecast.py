"""A configuration becomes a forecast: what is known of the run, its phases, its time, and what would be better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from supertuner.config.settings.tree import RunConfig
from supertuner.data.ordering.buckets import Bucket
from supertuner.plan.forecast import duration
from supertuner.plan.forecast.context import Situation
from supertuner.plan.forecast.dataset_sizes import Holding
from supertuner.plan.forecast.model import Change, Forecast, Phase, Room, Timing
from supertuner.plan.forecast.phases import phases, sample_size
from supertuner.plan.forecast.run_model import Expertise, KnownRun, Tracing
from supertuner.plan.forecast.storage import together
from supertuner.plan.forecast.suggestions import changes
from supertuner.plan.forecast.timing import Repeated, Whole, timing
from supertuner.plan.placement.planner import Planning

ASSUMED_SHARE = 0.4
"""Of the published peaks, for a second column of times: 400 of a GH200's 990 TFLOPS. An assumption, not a measurement;
`--compute-share` says another."""
LAUNCH_S = 5e-6
"""About what it takes to start an operator on a GPU; only to say so where it decides."""


@dataclass(frozen=True, eq=False, slots=True)
class Estimated:
    """A forecast, and what pictures of it are drawn from."""

    forecast: Forecast
    experts: tuple[Expertise, ...]
    bucket: Bucket
    """The shape that needs the most."""
    planning: Planning | None
    """What a run is given to follow its plans; None: it follows none."""

    def fullest(self) -> Expertise:
        return max(self.experts, key=lambda one: one.traced.peak()[0])

    def idle_bytes(self, of: Expertise) -> int:
        """Of the experts that wait while this one is trained."""
        return sum(one.standing_bytes for one in self.experts if one is not of)


def forecast_run(
    config: RunConfig,
    room: Room,
    tracing: Tracing,
    held: Sequence[Holding],
    *,
    compute_share: float | None = None,
    advise: bool = True,
) -> Estimated:
    """Everything about a run on a machine. `advise`: also what single changes would do."""
    run = KnownRun(config, room, tracing, tuple(held))
    found, why = _timing(run, compute_share)
    parts = phases(run)
    forecast = Forecast(
        model=tracing.model.title,
        settings=settings_text(config, run.largest, run.micro_batches),
        room=run.room,
        phases=parts,
        stored=run.kept,
        timing=found,
        why_no_timing=why,
        changes=_advice(run, parts) if advise else (),
        plans=run.plans,
        notes=tuple(_notes(run)),
    )
    return Estimated(forecast, run.experts, run.largest, run.planning())


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


def _timing(run: KnownRun, compute_share: float | None) -> tuple[Timing | None, str]:
    if not run.timed:
        missing = ", ".join(run.rates.unknown)
        return None, f"{missing} of {run.room.title} is not known, so no time is modelled"
    unknown = [f"datasets[{one.id}]: {one.known}" for one in run.held if one.samples is None]
    whole = Whole(
        experts=tuple(one.steps for one in run.experts),
        shares=_shares(run),
        course=run.course,
        batch_size=run.config.train.batch_size,
        encoding=_encoded(run),
        sampling=_sampled(run),
        switch_every=run.config.model.switch_boundary_every,
        left_out=(*unknown, "reading and decoding files, loading weights, writing checkpoints"),
    )
    share = ASSUMED_SHARE if compute_share is None else compute_share
    return timing(whole, run.room.machine, run.limits, run.rates, (1.0, share)), ""


def _shares(run: KnownRun) -> dict[int, float]:
    """Where shares are not known, everything is taken to be as large as the largest."""
    found: dict[int, float] = {}
    for bucket, share in run.buckets.items():
        if share is None:
            return {run.tracing.tokens(run.largest): 1.0}
        tokens = run.tracing.tokens(bucket)
        found[tokens] = found.get(tokens, 0.0) + share
    return found


def _encoded(run: KnownRun) -> tuple[Repeated, ...] | None:
    """Every sample in every variation, in proportion to its volume; every caption."""
    volume, captions = 0.0, 0
    for one in run.held:
        if one.samples is None or one.captions is None:
            return None
        volume += one.media_turns * sum(filled.samples * prod(filled.bucket.shape) for filled in one.filled)
        captions += one.text_turns * one.captions.count
    media, text = run.tracing.media(run.largest), run.tracing.text()
    return Repeated.of(media, volume / prod(run.largest.shape)), Repeated.of(text, captions)


def _sampled(run: KnownRun) -> tuple[Repeated, ...] | None:
    if run.course is None:
        return None
    settings = run.config.validation
    count = duration.validations(settings, run.course.total_steps) * duration.samples_each(settings)
    if not count:
        return ()
    work = run.tracing.sampling(sample_size(run)).work(settings.inference_steps)
    return (Repeated((work,), count),)


# ── advice ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _advice(run: KnownRun, parts: Sequence[Phase]) -> tuple[Change, ...]:
    """About the expert whose training needs the most."""
    worst = max(run.experts, key=lambda one: one.traced.peak()[0])
    mine = next(phase for phase in parts if phase.name == worst.phase)
    now = Situation(
        config=run.config,
        room=run.room,
        rates=run.rates if run.timed else None,
        table=worst.steps.table,
        choice=worst.steps.choice,
        peak_bytes=mine.everything_bytes,
        other_bytes=max((one.gpu_bytes for one in parts if not one.name.startswith("train ")), default=0),
        host_bytes=together(run.kept, "memory")[0],
        plan=run.plans.get(worst.phase),
        acts=run.acts,
        limits=run.limits,
    )
    return changes(now)


def _notes(run: KnownRun) -> list[str]:
    found = []
    if run.config.parallel.strategy == "fsdp":
        found.append('all of it is of one process that has all weights; parallel.strategy "fsdp" is not forecast')
    return found + _small_steps(run)


def _small_steps(run: KnownRun) -> list[str]:
    if not run.timed:
        return []
    works = [stretch.work for stretch in run.experts[0].traced.stretches]
    launched = LAUNCH_S * sum(work.operators for work in works)
    if sum(map(run.rates.seconds, works)) >= launched:
        return []
    return ["a step this small is mostly launching operators, which is not in its time"]
