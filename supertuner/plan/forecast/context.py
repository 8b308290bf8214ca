"""A run as its settings say, at the step that needs the most: what changes are measured against. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from supertuner.config.settings.tree import RunConfig
from supertuner.plan.forecast.model import Room
from supertuner.plan.placement.choice import Choice, Step
from supertuner.plan.placement.memory_needs import needs
from supertuner.plan.placement.plan import Fate, Plan
from supertuner.plan.placement.step_table import Block, StepTable, Work
from supertuner.plan.placement.throughput import Limits, Rates


@dataclass(frozen=True, slots=True)
class Situation:
    """A run as its settings say, at the step that needs the most."""

    config: RunConfig
    room: Room
    rates: Rates | None
    """None: a figure of the machine that times are made from is not known."""
    table: StepTable
    """Of the step in which nothing is recomputed."""
    choice: Choice
    """How the settings run it."""
    peak_bytes: int
    """Of the training phase, as traced."""
    other_bytes: int
    """The fullest of the other phases."""
    host_bytes: int
    """What the run has in host memory already."""
    plan: Plan | None = None
    """The best placement there is; followed or not."""
    acts: bool = False
    """The run follows it, and will follow another one after a change."""
    limits: Limits | None = None
    """What a plan may use."""

    @property
    def seconds(self) -> float | None:
        """Of a window, as the run does it."""
        if self.rates is None:
            return None
        if self.follows and self.plan is not None and self.plan.modelled is not None:
            return self.plan.modelled.seconds
        return plain_seconds(self.table, self.choice, self.rates)

    @property
    def follows(self) -> bool:
        return self.acts and self.plan is not None and self.plan.fits

    @property
    def fits(self) -> bool:
        has = self.room.gpu_bytes
        if has is None:
            return False
        peak = 0 if self.follows else self.peak_bytes
        return max(peak, self.other_bytes) + self.pooled_bytes <= has

    @property
    def pooled_bytes(self) -> int:
        """Host memory that is the GPU's too."""
        return self.host_bytes if self.room.one_pool else 0


ANY_RATES = Rates(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, one_pool=False)
"""Memory does not depend on speed."""


def needed(table: StepTable, choice: Choice) -> int:
    return needs(Step.of(table, ANY_RATES), choice).gpu


def as_configured(table: StepTable, checkpointing: bool) -> Choice:
    """How a run without a plan runs a step: everything on the GPU; activations kept, or recomputed everywhere."""
    nothing = Choice.nothing(len(table.blocks))
    if not checkpointing:
        return nothing
    return replace(nothing, fates=tuple(Fate.RECOMPUTE if b.recomputable else Fate.KEEP for b in table.blocks))


def plain_seconds(table: StepTable, choice: Choice, rates: Rates) -> float:
    """Of a window in which nothing crosses the link."""
    step = Step.of(table, rates)
    again = sum(s for s, fate in zip(step.forward_s, choice.fates, strict=True) if fate is Fate.RECOMPUTE)
    return table.micro_batches * (step.micro_s + again) + step.update_s


def scaled(table: StepTable, share: float) -> StepTable:
    """The step of a batch with so many times the tokens."""
    return replace(
        table,
        blocks=tuple(_scaled(block, share) for block in table.blocks),
        batch_bytes=round(table.batch_bytes * share),
    )


def _scaled(block: Block, share: float) -> Block:
    return replace(
        block,
        saved_bytes=round(block.saved_bytes * share),
        input_bytes=round(block.input_bytes * share),
        forward_peak_bytes=round(block.forward_peak_bytes * share),
        backward_peak_bytes=round(block.backward_peak_bytes * share),
        forward=_less(block.forward, share),
        backward=_less(block.backward, share),
    )


def _less(work: Work, share: float) -> Work:
    return Work(work.matmul_flops * share, work.other_flops * share, work.gpu_bytes * share, work.operators)
