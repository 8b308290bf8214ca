"""The sizes of a run's datasets before staging: how many samples of which shapes, and the schedule that follows. Pure.

An unknown number is None; `explanation` says where the numbers come from, or how to provide them.
"""

from __future__ import annotations

from collections import defaultdict
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
    """The captions of a dataset that are encoded and cached."""

    count: int
    """Upper limit of the number of different captions; equal captions are encoded once."""
    total_bytes: int | None
    """UTF-8 bytes of all captions; None: unknown."""


@dataclass(frozen=True, slots=True)
class DatasetSize:
    """One dataset."""

    id: str
    in_memory: bool
    """True: staged into memory; False: on disk."""
    held_out: bool
    bucket_counts: tuple[BucketCount, ...]
    """Buckets with their samples. If the number of samples is unknown: the largest bucket, with 0 samples."""
    samples: int | None
    """Samples in all buckets; a sample that is used at several resolutions counts once for each."""
    stored_bytes: int | None
    """Bytes that staging takes if files are stored uncompressed."""
    captions: CaptionTotals | None
    explanation: str
    """Where the numbers come from, or why there are none and how to provide them."""
    draws_per_epoch: Fraction = ONE_DRAW
    """How often each sample is drawn per epoch."""
    cached_media_variants: int = 1
    """Encoded variations of each sample that are in the cache at once; 0: samples are not cached."""
    cached_text_variants: int = 1
    encoded_while_training: tuple[str, ...] = ()
    """`media`, `text`: what is encoded during training, so that its encoder stays on the GPU."""


def training_datasets(datasets: Sequence[DatasetSize]) -> tuple[DatasetSize, ...]:
    return tuple(one for one in datasets if not one.held_out)


def bucket_draw_shares(datasets: Sequence[DatasetSize]) -> dict[Bucket, float | None]:
    """Every bucket that is trained on, and its share of the draws; None: unknown."""
    draws: defaultdict[Bucket, float] = defaultdict(float)
    for dataset in training_datasets(datasets):
        for filled in dataset.bucket_counts:
            draws[filled.bucket] += float(dataset.draws_per_epoch * filled.samples)
    total = sum(draws.values())
    unknown = any(dataset.samples is None for dataset in training_datasets(datasets))
    if len(draws) == 1:
        return dict.fromkeys(draws, 1.0)
    return {bucket: None if unknown or not total else count / total for bucket, count in draws.items()}


def forecast_schedule(config: RunConfig, datasets: Sequence[DatasetSize]) -> TrainingSchedule | None:
    """The schedule of windows that training will use; None: the length of the run depends on the number of samples,
    which is unknown."""
    if all(dataset.samples for dataset in training_datasets(datasets)):
        return build_training_schedule(config, _sample_order(config, datasets).epoch_begin, world_size=1)
    if config.train.max_steps is None or config.train.num_epochs is not None:
        return None
    return build_training_schedule(config, _unknown_epoch_length, world_size=1)


def _sample_order(config: RunConfig, datasets: Sequence[DatasetSize]) -> SampleOrder:
    """The run's sample order over placeholder samples: its epochs have the lengths of the run's epochs."""
    groups = []
    for number, dataset in enumerate(training_datasets(datasets)):
        for filled in dataset.bucket_counts:
            samples = np.arange(filled.samples, dtype=np.uint32)
            groups.append(BucketGroup(number, dataset.id, filled.bucket, samples, dataset.draws_per_epoch))
    batch_size, drop_last = config.train.batch_size, config.loader.drop_last
    return SampleOrder(groups, seed=config.run.seed, batch_size=batch_size, drop_last=drop_last)


def _unknown_epoch_length(epoch: int) -> int:
    raise AssertionError(f"the length of {epoch} epochs is not known, and max_steps alone ends the run")
