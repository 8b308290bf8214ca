"""One configured run on one machine, as far as it is known before it begins: its shapes, its traced steps, its plans.

`Tracing` gives the traces, made now or kept from an earlier look. Nothing is loaded, staged or written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from supertuner.config.settings.tree import RunConfig
from supertuner.core.errors import ModelError
from supertuner.data.ordering.buckets import Bucket
from supertuner.models.adapters import attach as adapters
from supertuner.models.spec import Expert, Family, Model
from supertuner.optim.schedule import Course
from supertuner.plan.forecast import dataset_sizes as holdings
from supertuner.plan.forecast import duration
from supertuner.plan.forecast.context import as_configured
from supertuner.plan.forecast.dataset_sizes import Holding
from supertuner.plan.forecast.model import HOST_SHARE, TIGHT_SHARE, Room
from supertuner.plan.forecast.storage import Sizes, Stored, Trained, stored, together
from supertuner.plan.forecast.timing import Steps
from supertuner.plan.placement.overrides import wished
from supertuner.plan.placement.plan import Modelled, Plan
from supertuner.plan.placement.plan_step import judged, place
from supertuner.plan.placement.planner import Planning
from supertuner.plan.placement.roofline import bound
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.throughput import Limits, Rates
from supertuner.plan.trace.phases import SampleTrace
from supertuner.plan.trace.record import Kind, Trace
from supertuner.plan.trace.summary import table_of
from supertuner.step.trainee import experts_of
from supertuner.train.offload.optimizer_step import PIECEWISE

SHAPES_TRACED = 3
"""Sizes of batches that are traced for their time; the others lie between them."""
ALIKE = 0.05
"""Sizes that differ by less are taken for one."""
STANDING = (Kind.FROZEN, Kind.TRAINED, Kind.STATE)


class Tracing(Protocol):
    """Who traces the phases of a configured run."""

    @property
    def family(self) -> Family: ...
    @property
    def model(self) -> Model: ...
    def tokens(self, bucket: Bucket) -> int:
        """Of one sample."""

    def convolves(self, expert: Expert) -> bool:
        """Whether much of it is convolutions, whose workspaces nobody knows without the GPU."""

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
    def phase(self) -> str:
        return f"train {self.expert.name}"

    @property
    def standing_bytes(self) -> int:
        """Weights and state: what it takes while it waits."""
        at = self.traced.by_kind(0)
        return sum(at[kind] for kind in STANDING)


class KnownRun:
    """Everything that is worked out once, and used for memory, time and advice alike."""

    def __init__(self, config: RunConfig, room: Room, tracing: Tracing, held: tuple[Holding, ...]) -> None:
        room = replace(room, overflows=config.memory.overflow.enabled and not room.one_pool)
        self.config, self.room, self.tracing, self.held = config, room, tracing, held
        self.buckets = holdings.shapes_drawn(held)
        _require(tracing, self.buckets)
        self.course: Course | None = holdings.course(config, held)
        self.largest = max(self.buckets, key=lambda bucket: (tracing.tokens(bucket), bucket))
        self.rates = Rates.of(room.machine, config.train.mixed_precision)
        self.micro_batches = duration.largest_window(config, self.course)
        self.encoder_bytes = self._encoder_bytes()
        self.experts = self._experts()
        self.kept = self._stored()
        self.plans = self._plans()
        if self.acts:
            self.experts = tuple(self._planned(one) for one in self.experts)

    @property
    def acts(self) -> bool:
        """Whether the run follows plans: on a GPU, unless it was told not to."""
        return self.config.plan.act == "auto" and not self.room.on_cpu

    @property
    def timed(self) -> bool:
        """Whether the machine's figures are known."""
        return not self.rates.unknown

    @property
    def limits(self) -> Limits | None:
        """What a plan may use: not the last of the GPU's memory, which a driver and gaps between tensors need; nor the
        last of the host's, nor what caches and staged files have of it."""
        if self.room.gpu_bytes is None:
            return None
        taken, host = together(self.kept, "memory")[0], self.room.host_bytes
        gpu = int(self.room.gpu_bytes * TIGHT_SHARE) - self.encoder_bytes
        return Limits(max(0, gpu), None if host is None else max(0, int(host * HOST_SHARE) - taken))

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
            found = table_of(trace, micro_batches=self.micro_batches, idle_bytes=idle)
            return replace(found, by_pieces=self.config.optimizer.name in PIECEWISE)

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

    def _encoder_bytes(self) -> int:
        """Where samples are encoded when they are used, or anew for each epoch, encoders stay beside training."""
        at_work = {what for one in self.held for what in one.encodes}
        traces = [self.tracing.media(self.largest)] if "media" in at_work else []
        traces += [self.tracing.text()] if "text" in at_work else []
        return sum(trace.by_kind(0)[Kind.FROZEN] for trace in traces)

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

    def _plans(self) -> Mapping[str, Plan]:
        """Experts with the same step have the same plan."""
        limits = self.limits
        if limits is None:
            return {}
        made: dict[StepTable, Plan] = {}
        found = {}
        for one in self.experts:
            table = replace(one.steps.table, phase="")
            if table not in made:
                made[table] = place(table, self.room.machine, limits, rates=self.rates)
            found[one.phase] = replace(made[table], phase=one.phase)
        self._as_placed: dict[str, Plan] = found
        if not self.config.plan.wishes and self.config.plan.ahead is None:
            return found
        return {one.phase: self._wished(one, found[one.phase], limits) for one in self.experts}

    def _planned(self, one: Expertise) -> Expertise:
        plan = self.plans.get(one.phase)
        return replace(one, steps=replace(one.steps, plan=plan if plan is not None and plan.fits else None))

    def _wished(self, one: Expertise, plan: Plan, limits: Limits) -> Plan:
        """The plan with what the settings ask for instead, and what it then needs and takes."""
        table, settings = one.steps.table, self.config.plan
        blocks = [block.name for block in table.blocks if block.recomputable]
        recomputing = self.config.train.gradient_checkpointing
        asked = wished(settings, plan, blocks, phase=one.phase, recomputing=recomputing) or plan
        if asked.modelled is plan.modelled or not self.timed:
            return asked
        found = judged(table, asked, self.room.machine, limits, self.rates)
        least = bound(table, self.rates, limits)
        modelled = Modelled(found.seconds, least.seconds, least.by, found.needs.gpu, found.needs.host)
        return replace(asked, fits=found.played is not None, modelled=modelled)

    def planning(self) -> Planning | None:
        """What a run that follows plans is given; None: it follows none."""
        limits = self.limits
        if not self.acts or limits is None:
            return None
        return Planning(
            machine=self.room.machine,
            limits=limits,
            rates=self.rates,
            batch_size=self.config.train.batch_size,
            tables={one.expert.name: one.steps.table for one in self.experts},
            plans={one.expert.name: self._as_placed[one.phase] for one in self.experts},
        )


def _require(tracing: Tracing, buckets: Mapping[Bucket, float | None]) -> None:
    """What training would refuse is refused here too, in the same words."""
    for bucket in buckets:
        reason = tracing.family.why_not(tracing.model, bucket.shape)
        if reason is not None:
            raise ModelError(f"bucket {bucket.label}: {reason}; change bucket_step, resolution or frames")
