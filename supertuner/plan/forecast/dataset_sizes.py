"""What a run's datasets hold, as far as it is known before anything is staged: how many samples, of which shapes. Pure.

A number that nobody knows is None, and `known` says where the others come from, or what to say to have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from supertuner.config.settings.run_config import RunConfig
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.ordering.sample_order import BucketGroup, SampleOrder
from supertuner.optim.schedule import TrainingSchedule, build_training_schedule

ONE_DRAW = Fraction(1)


@dataclass(frozen=True, slots=True)
class BucketCount:
    """A bucket and how many samples are in it."""

    bucket: Bucket
    samples: int


@dataclass(frozen=True, slots=True)
class CaptionTotals:
    """What of a dataset's captions is encoded and cached."""

    count: int
    """At most so many different ones: equal captions are encoded once."""
    total_bytes: int | None
    """Of all of them, as UTF-8; None: nobody looked."""


@dataclass(frozen=True, slots=True)
class DatasetSize:
    """One dataset."""

    id: str
    in_memory: bool
    """Staged into memory; otherwise on a disk."""
    held_out: bool
    bucket_counts: tuple[BucketCount, ...]
    """Buckets with their samples. Where the number of samples is not known, the largest bucket with none."""
    samples: int | None
    """In all buckets together; a sample that is used at several resolutions counts at each."""
    stored_bytes: int | None
    """What staging will take, if files are stored as they are."""
    captions: CaptionTotals | None
    explanation: str
    """Where the numbers come from, or why there are none and what to do about it."""
    draws_per_epoch: Fraction = ONE_DRAW
    """How often each sample is drawn in an epoch."""
    cached_media_variants: int = 1
    """Encoded variations of each sample that are cached at once; 0: none is cached."""
    cached_text_variants: int = 1
    encoded_while_training: tuple[str, ...] = ()
    """`media`, `text`: what is encoded while training goes on, so that its encoder stays on the GPU."""

    @property
    def cache_entries(self) -> int | None:
        """Encoded samples in the cache."""
        return None if self.samples is None else self.samples * self.cached_media_variants


def training_datasets(datasets: Sequence[DatasetSize]) -> tuple[DatasetSize, ...]:
    return tuple(one for one in datasets if not one.held_out)


def bucket_draw_shares(datasets: Sequence[DatasetSize]) -> dict[Bucket, float | None]:
    """Every bucket that is trained on, and its share of the draws; None where that is not known."""
    draws: dict[Bucket, float] = {}
    for dataset in training_datasets(datasets):
        for bucket_count in dataset.bucket_counts:
            draws[bucket_count.bucket] = draws.get(bucket_count.bucket, 0.0) + float(
                dataset.draws_per_epoch * bucket_count.samples
            )
    total = sum(draws.values())
    unknown = any(holding.samples is None for holding in training_datasets(datasets))
    if len(draws) == 1:
        return dict.fromkeys(draws, 1.0)
    return {bucket: None if unknown or not total else count / total for bucket, count in draws.items()}


def forecast_schedule(
    config: RunConfig, datasets: Sequence[DatasetSize], world_size: int = 1
) -> TrainingSchedule | None:
    """The run's windows, as training will cut them; None: how long it is follows from how many samples there are, and
    that is not known."""
    train = config.train
    sizes_known = all(holding.samples for holding in training_datasets(datasets))
    if not sizes_known:
        if train.max_steps is None or train.num_epochs is not None:
            return None
        return build_training_schedule(config, _unknown_epoch_length, world_size)
    order = _sample_order(config, datasets)
    return build_training_schedule(config, order.epoch_begin, world_size)


def _sample_order(config: RunConfig, datasets: Sequence[DatasetSize]) -> SampleOrder:
    """The order itself, over numbers instead of samples: its epochs are as long as those of the run."""
    groups = [
        BucketGroup(
            number, holding.id, filled.bucket, np.arange(filled.samples, dtype=np.uint32), holding.draws_per_epoch
        )
        for number, holding in enumerate(training_datasets(datasets))
        for filled in holding.bucket_counts
    ]
    return SampleOrder(
        groups, seed=config.run.seed, batch_size=config.train.batch_size, drop_last=config.loader.drop_last
    )


def _unknown_epoch_length(epoch: int) -> int:
    raise AssertionError(f"the length of {epoch} epochs is not known, and max_steps alone ends the run")
