"""What a run's datasets hold, as far as it is known before anything is staged: how many samples, of which shapes. Pure.

A number that nobody knows is None, and `known` says where the others come from, or what to say to have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from supertuner.config.settings.tree import RunConfig
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.ordering.order import Group, Order
from supertuner.optim.schedule import Course, course_of

ONE_EACH = Fraction(1)


@dataclass(frozen=True, slots=True)
class Filled:
    """A bucket and how many samples are in it."""

    bucket: Bucket
    samples: int


@dataclass(frozen=True, slots=True)
class Captions:
    """What of a dataset's captions is encoded and cached."""

    count: int
    """At most so many different ones: equal captions are encoded once."""
    total_bytes: int | None
    """Of all of them, as UTF-8; None: nobody looked."""


@dataclass(frozen=True, slots=True)
class Holding:
    """One dataset."""

    id: str
    in_memory: bool
    """Staged into memory; otherwise on a disk."""
    held_out: bool
    filled: tuple[Filled, ...]
    """Buckets with their samples. Where the number of samples is not known, the largest bucket with none."""
    samples: int | None
    """In all buckets together; a sample that is used at several resolutions counts at each."""
    stored_bytes: int | None
    """What staging will take, if files are stored as they are."""
    captions: Captions | None
    known: str
    """Where the numbers come from, or why there are none and what to do about it."""
    rate: Fraction = ONE_EACH
    """How often each sample is drawn in an epoch."""
    media_turns: int = 1
    """Encoded variations of each sample that are cached at once; 0: none is cached."""
    text_turns: int = 1
    encodes: tuple[str, ...] = ()
    """`media`, `text`: what is encoded while training goes on, so that its encoder stays on the GPU."""

    @property
    def entries(self) -> int | None:
        """Encoded samples in the cache."""
        return None if self.samples is None else self.samples * self.media_turns


def trained_on(holdings: Sequence[Holding]) -> tuple[Holding, ...]:
    return tuple(one for one in holdings if not one.held_out)


def shapes_drawn(holdings: Sequence[Holding]) -> dict[Bucket, float | None]:
    """Every bucket that is trained on, and its share of the draws; None where that is not known."""
    draws: dict[Bucket, float] = {}
    for holding in trained_on(holdings):
        for filled in holding.filled:
            draws[filled.bucket] = draws.get(filled.bucket, 0.0) + float(holding.rate * filled.samples)
    total = sum(draws.values())
    unknown = any(holding.samples is None for holding in trained_on(holdings))
    if len(draws) == 1:
        return dict.fromkeys(draws, 1.0)
    return {bucket: None if unknown or not total else count / total for bucket, count in draws.items()}


def course(config: RunConfig, holdings: Sequence[Holding], processes: int = 1) -> Course | None:
    """The run's windows, as training will cut them; None: how long it is follows from how many samples there are, and
    that is not known."""
    train = config.train
    known = all(holding.samples for holding in trained_on(holdings))
    if not known:
        if train.max_steps is None or train.num_epochs is not None:
            return None
        return course_of(config, _nobody_asks, processes)
    order = _order(config, holdings)
    return course_of(config, order.epoch_begin, processes)


def _order(config: RunConfig, holdings: Sequence[Holding]) -> Order:
    """The order itself, over numbers instead of samples: its epochs are as long as those of the run."""
    groups = [
        Group(number, holding.id, filled.bucket, np.arange(filled.samples, dtype=np.uint32), holding.rate)
        for number, holding in enumerate(trained_on(holdings))
        for filled in holding.filled
    ]
    return Order(groups, seed=config.run.seed, batch_size=config.train.batch_size, drop_last=config.loader.drop_last)


def _nobody_asks(epoch: int) -> int:
    raise AssertionError(f"the length of {epoch} epochs is not known, and max_steps alone ends the run")
