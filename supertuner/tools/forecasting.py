"""A configuration becomes a forecast: data are looked at, steps traced, a plan made, and everything added up.

Whoever asks gives the machine; `Tracing` gives the traces, made now or kept from an earlier look. Nothing is loaded,
staged or written here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

from supertuner.config.tree import RunConfig
from supertuner.core.errors import ModelError
from supertuner.core.types import MediaKind
from supertuner.data.ordering.buckets import Bucket
from supertuner.models import adapters
from supertuner.models.spec import Expert, Family, Model
from supertuner.optim.schedule import Course
from supertuner.plan import duration, holdings
from supertuner.plan.caching import reserved
from supertuner.plan.changes import Situation, as_configured, changes
from supertuner.plan.decision import Plan
from supertuner.plan.forecast import Change, Forecast, Phase, Room, Timing
from supertuner.plan.holdings import Holding
from supertuner.plan.phases import SampleTrace
from supertuner.plan.placement import place
from supertuner.plan.rates import Limits, Rates
from supertuner.plan.record import Kind, Trace
from supertuner.plan.storage import Sizes, Stored, Trained, stored, together
from supertuner.plan.summary import table_of
from supertuner.plan.table import StepTable
from supertuner.plan.timeline import IDLE
from supertuner.plan.timing import Repeated, Steps, Whole, timing
from supertuner.step.trainee import experts_of
from supertuner.train import sample_plan

ASSUMED_SHARE = 0.4
"""Of the published peaks, for a second column of times: 400 of a GH200's 990 TFLOPS. An assumption, not a measurement;
`--compute-share` says another."""
SHAPES_TRACED = 3
"""Sizes of batches that are traced for their time; the others lie between them."""
ALIKE = 0.05
"""Sizes that differ by less are taken for one."""
LAUNCH_S = 5e-6
"""About what it takes to start an operator on a GPU; only to say so where it decides."""
STANDING = (Kind.FROZEN, Kind.TRAINED, Kind.STATE)


class Tracing(Protocol):
    """Who traces the phases of a configured run."""

    @property
    def family(self) -> Family: ...
    @property
    def model(self) -> Model: ...
    def tokens(self, bucket: Bucket) -> int:
        """Of one sample."""

    def training(self, expert: Expert, bucket: Bucket, checkpointing: bool, micro_batches: int = 1) -> Trace: ...
    def media(self, bucket: Bucket) -> Trace:
        """Of encoding one sample."""

    def text(self) -> Trace:
        """Of encoding one caption."""

    def sampling(self, bucket: Bucket) -> SampleTrace:
        """Of one sample, with all that is on the GPU for it."""

    def sizes(self) -> Sizes: ...


@dataclass(frozen=True, eq=False, slots=True)
class Expertise:
    """What is known of one expert's training."""

    expert: Expert
    traced: Trace
    """As configured, at the shape that needs the most."""
    steps: Steps

    @property
    def standing_bytes(self) -> int:
        """Weights and state: what it takes while it waits."""
        at = self.traced.by_kind(0)
        return sum(at[kind] for kind in STANDING)


@dataclass(frozen=True, eq=False, slots=True)
class Estimated:
    """A forecast, and what pictures of it are drawn from."""

    forecast: Forecast
    experts: tuple[Expertise, ...]
    bucket: Bucket
    """The shape that needs the most."""

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
    run = _Run(config, room, tracing, tuple(held))
    found = Estimated(run.forecast(compute_share), run.experts, run.largest)
    if not advise:
        return found
    return replace(found, forecast=replace(found.forecast, changes=run.advice(found)))


class _Run:
    """One configuration on one machine, worked out once."""

    def __init__(self, config: RunConfig, room: Room, tracing: Tracing, held: tuple[Holding, ...]) -> None:
        room = replace(room, overflows=config.memory.overflow.enabled and not room.one_pool)
        self.config, self.room, self.tracing, self.held = config, room, tracing, held
        self.buckets = holdings.shapes_drawn(held)
        _require(tracing, self.buckets)
        self.course: Course | None = holdings.course(config, held)
        self.largest = max(self.buckets, key=lambda bucket: (tracing.tokens(bucket), bucket))
        self.rates = Rates.of(room.machine, config.train.mixed_precision)
        self.micro_batches = duration.largest_window(config, self.course)
        self.experts = self._experts()
        self.kept = self._stored()
        self.plans = self._plans()
        if self.acts:
            self.experts = tuple(self._planned(one) for one in self.experts)

    @property
    def acts(self) -> bool:
        """Whether the run follows plans: on a GPU, unless it was told not to."""
        plan = getattr(self.config, "plan", None)
        return plan is not None and plan.act == "auto" and not self.room.on_cpu

    def _planned(self, one: Expertise) -> Expertise:
        plan = self.plans.get(f"train {one.expert.name}")
        return replace(one, steps=replace(one.steps, plan=plan if plan is not None and plan.fits else None))

    @property
    def timed(self) -> bool:
        """Whether the machine's figures are known."""
        return not self.rates.unknown

    @property
    def limits(self) -> Limits | None:
        """What a step may use; caches and staged files have their part of host memory already."""
        if self.room.gpu_bytes is None:
            return None
        taken, host = together(self.kept, "memory")[0], self.room.host_bytes
        return Limits(self.room.gpu_bytes, None if host is None else max(0, host - taken))

    # ── what is traced ───────────────────────────────────────────────────────────────────────────────────────────

    def _experts(self) -> tuple[Expertise, ...]:
        chosen = experts_of(self.config, self.tracing.model)
        traced = {expert.name: self._as_configured(expert) for expert in chosen}
        waiting = {name: sum(trace.by_kind(0)[kind] for kind in STANDING) for name, trace in traced.items()}
        found = []
        for expert in chosen:
            idle = sum(nbytes for name, nbytes in waiting.items() if name != expert.name)
            found.append(Expertise(expert, traced[expert.name], self._steps(expert, idle)))
        return tuple(found)

    def _as_configured(self, expert: Expert) -> Trace:
        """The second micro-batch of a window finds the gradients of the first. Those of an adapter are small, and are
        added; of whole weights they are not, and two micro-batches are traced."""
        checkpointing = self.config.train.gradient_checkpointing
        several = self.micro_batches > 1 and self.config.adapter.type in ("full", "diff")
        return self.tracing.training(expert, self.largest, checkpointing, 2 if several else 1)

    def _steps(self, expert: Expert, idle: int) -> Steps:
        def table(bucket: Bucket) -> StepTable:
            trace = self.tracing.training(expert, bucket, False)
            return table_of(trace, micro_batches=self.micro_batches, idle_bytes=idle)

        largest = table(self.largest)
        others = {self.tracing.tokens(one): table(one) for one in self._other_sizes()} if self.timed else {}
        choice = as_configured(largest, self.config.train.gradient_checkpointing)
        return Steps(largest, choice, None, self.tracing.tokens(self.largest), others)

    def _other_sizes(self) -> list[Bucket]:
        """Buckets of other sizes whose time is worth a trace: the smallest, and one in the middle."""
        most = self.tracing.tokens(self.largest)
        sizes: dict[int, Bucket] = {}
        for bucket in self.buckets:
            tokens = self.tracing.tokens(bucket)
            if all(abs(tokens - other) > ALIKE * other for other in (*sizes, most)):
                sizes[tokens] = bucket
        ordered = [sizes[tokens] for tokens in sorted(sizes)]
        return ordered if len(ordered) < SHAPES_TRACED else [ordered[0], ordered[len(ordered) // 2]]

    def _stored(self) -> tuple[Stored, ...]:
        trained = tuple(self._trained(one) for one in self.experts)
        batch = self.experts[0].steps.table.batch_bytes
        return stored(self.config, self.held, self.tracing.sizes(), trained, batch)

    def _trained(self, one: Expertise) -> Trained:
        at = one.traced.by_kind(0)
        parameters = at[Kind.TRAINED]
        full = adapters.for_expert(self.config.adapter, one.expert.name).type == "full"
        halved = full and self.config.train.mixed_precision != "fp32"
        return Trained(one.expert.name, parameters, at[Kind.STATE], parameters // 2 if halved else parameters)

    # ── what it comes to ─────────────────────────────────────────────────────────────────────────────────────────

    def forecast(self, compute_share: float | None) -> Forecast:
        found, why = self._timing(compute_share)
        return Forecast(
            model=self.tracing.model.title,
            settings=settings_text(self.config, self.largest, self.micro_batches),
            room=self.room,
            phases=(*self._encoding(), *self._training(), *self._sampling()),
            stored=self.kept,
            timing=found,
            why_no_timing=why,
            plans=self.plans,
            notes=tuple(self._notes()),
        )

    def _encoding(self) -> list[Phase]:
        """Encoders come one after the other, before any denoiser is loaded."""
        text, media = self.tracing.text(), self.tracing.media(self.largest)
        return [self._phase(text), self._phase(media, certain=False)]

    def _training(self) -> list[Phase]:
        found = []
        for one in self.experts:
            phase = self._phase(one.traced, idle_bytes=one.steps.table.idle_bytes)
            gradients = sum(block.gradient_bytes for block in one.steps.table.blocks)
            if self.micro_batches > 1:
                missing = max(0, gradients - phase.gpu.get(Kind.GRADIENT.text, 0))
                phase = replace(
                    phase,
                    gpu={**phase.gpu, Kind.GRADIENT.text: phase.gpu.get(Kind.GRADIENT.text, 0) + missing},
                    reserved_bytes=None if phase.reserved_bytes is None else phase.reserved_bytes + missing,
                )
            found.append(replace(phase, plan=one.steps.plan))
        return found

    def _sampling(self) -> list[Phase]:
        """At a validation everything is on the GPU at once."""
        if not self._validates():
            return []
        phase = self._phase(self.tracing.sampling(self._sample_size()).trace, certain=False)
        plans = [one.steps.plan for one in self.experts if one.steps.plan is not None]
        if not any(plan.idle_at_home for plan in plans):
            return [phase]
        waits = min(one.steps.table.idle_bytes for one in self.experts)
        frozen = Kind.FROZEN.text
        return [
            replace(
                phase,
                gpu={**phase.gpu, frozen: max(0, phase.gpu.get(frozen, 0) - waits)},
                reserved_bytes=None if phase.reserved_bytes is None else phase.reserved_bytes - waits,
                host={"the expert that waits": waits},
            )
        ]

    def _phase(self, trace: Trace, *, idle_bytes: int = 0, certain: bool = True) -> Phase:
        """At its fullest moment; and what the allocator has of the GPU by then, giving back what it can if it must."""
        at = trace.by_kind(trace.peak()[1])
        gpu = {kind.text: nbytes for kind, nbytes in at.items() if nbytes} | ({IDLE: idle_bytes} if idle_bytes else {})
        notes = trace.notes
        taken = None
        if not self.room.on_cpu:
            has = self.room.gpu_bytes
            found = reserved(trace, limit_bytes=None if has is None else max(0, has - idle_bytes))
            if not found.fits:
                found = reserved(trace)
            elif found.retries:
                notes = (*notes, f"{trace.phase}: the allocator gives memory back {found.retries} times to find room")
            taken = found.reserved_bytes + idle_bytes
        return Phase(trace.phase, gpu, taken, notes=notes, certain=certain)

    def _validates(self) -> bool:
        settings = self.config.validation
        return settings.at_start or settings.at_end or settings.every_steps is not None

    def _sample_size(self) -> Bucket:
        """As validation says, and where it does not, that of the bucket with the most pixels."""
        settings = self.config.validation
        size = sample_plan.largest(self.buckets)
        width, height = settings.width or size.width, settings.height or size.height
        frames = settings.frames or size.frames
        kind = MediaKind.VIDEO if frames > 1 else MediaKind.IMAGE
        return Bucket(kind, width, height, frames, channels=3)

    def _sampled(self) -> tuple[Repeated, ...] | None:
        if self.course is None:
            return None
        settings = self.config.validation
        count = duration.validations(settings, self.course.total_steps) * duration.samples_each(settings)
        if not count:
            return ()
        work = self.tracing.sampling(self._sample_size()).work(settings.inference_steps)
        return (Repeated((work,), count),)

    def _timing(self, compute_share: float | None) -> tuple[Timing | None, str]:
        if not self.timed:
            missing = ", ".join(self.rates.unknown)
            return None, f"{missing} of {self.room.title} is not known, so no time is modelled"
        whole = Whole(
            experts=tuple(one.steps for one in self.experts),
            shares=self._shares(),
            course=self.course,
            batch_size=self.config.train.batch_size,
            encoding=self._encoded(),
            sampling=self._sampled(),
            left_out=tuple(self._left_out()),
        )
        share = ASSUMED_SHARE if compute_share is None else compute_share
        return timing(whole, self.room.machine, self.limits, self.rates, (1.0, share)), ""

    def _shares(self) -> dict[int, float]:
        """Where shares are not known, everything is taken to be as large as the largest."""
        found: dict[int, float] = {}
        for bucket, share in self.buckets.items():
            if share is None:
                return {self.tracing.tokens(self.largest): 1.0}
            tokens = self.tracing.tokens(bucket)
            found[tokens] = found.get(tokens, 0.0) + share
        return found

    def _encoded(self) -> tuple[Repeated, ...] | None:
        """Every sample in every variation, in proportion to its volume; every caption."""
        volume, captions = 0.0, 0
        for one in self.held:
            if one.samples is None or one.captions is None:
                return None
            volume += one.media_turns * sum(filled.samples * prod(filled.bucket.shape) for filled in one.filled)
            captions += one.text_turns * one.captions.count
        media, text = self.tracing.media(self.largest), self.tracing.text()
        return Repeated.of(media, volume / prod(self.largest.shape)), Repeated.of(text, captions)

    def _left_out(self) -> list[str]:
        unknown = [f"datasets[{one.id}]: {one.known}" for one in self.held if one.samples is None]
        return [*unknown, "reading and decoding files, loading weights, writing checkpoints"]

    def _plans(self) -> Mapping[str, Plan]:
        limits = self.limits
        if limits is None:
            return {}
        return {
            f"train {one.expert.name}": place(one.steps.table, self.room.machine, limits, rates=self.rates)
            for one in self.experts
        }

    def _notes(self) -> list[str]:
        found = []
        if self._launches():
            found.append("a step this small is mostly launching operators, which is not in its time")
        return found

    def _launches(self) -> bool:
        """Whether starting operators takes longer than their work: some microseconds each, whatever the machine."""
        if not self.timed:
            return False
        works = [stretch.work for stretch in self.experts[0].traced.stretches]
        return sum(map(self.rates.seconds, works)) < LAUNCH_S * sum(work.operators for work in works)

    def advice(self, found: Estimated) -> tuple[Change, ...]:
        worst = found.fullest()
        phases = found.forecast.phases
        mine = next(phase for phase in phases if phase.name == f"train {worst.expert.name}")
        now = Situation(
            config=self.config,
            room=self.room,
            rates=self.rates if self.timed else None,
            table=worst.steps.table,
            choice=worst.steps.choice,
            peak_bytes=max(sum(mine.gpu.values()), mine.reserved_bytes or 0),
            other_bytes=max((one.gpu_bytes for one in phases if not one.name.startswith("train ")), default=0),
            host_bytes=together(self.kept, "memory")[0],
            plan=self.plans.get(mine.name),
            acts=self.acts,
        )
        return changes(now)


def _require(tracing: Tracing, buckets: Mapping[Bucket, float | None]) -> None:
    """What training would refuse is refused here too, in the same words."""
    for bucket in buckets:
        reason = tracing.family.why_not(tracing.model, bucket.shape)
        if reason is not None:
            raise ModelError(f"bucket {bucket.label}: {reason}; change bucket_step, resolution or frames")


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
