"""Surveys a run's datasets without staging them: files are listed, some of them are read, nothing is written.

If there are many files, a sample of them is read, and the others are assumed to have the same distribution of shapes.
The size of a dataset that is not on this machine is what the user gives (`--samples`), or unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

import numpy as np

from supertuner.config.settings.data import DatasetSettings
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import BrokenMediaError
from supertuner.core.types import MIB
from supertuner.data.cache_policy import CacheMode, dataset_cache_policy
from supertuner.data.ordering.bucket_assignment import bucket_indices, bucket_table
from supertuner.data.ordering.buckets import NO_BUCKET, Bucket
from supertuner.data.ordering.sample_collection import MediaMetadataSlice
from supertuner.data.ordering.sample_order import draws_per_epoch
from supertuner.data.probe import probe
from supertuner.data.probe.media_info import MediaInfo
from supertuner.data.sources import open_source
from supertuner.data.sources.listing import DataSource, FileSpan, SkippedFile, SourceItem, SourceListing
from supertuner.data.staging import budget as fit
from supertuner.data.staging.span_reader import read_span
from supertuner.plan.forecast.dataset_sizes import BucketCount, CaptionTotals, DatasetSize

MAX_FILES_READ = 400
"""Files that are read at most: enough to distinguish a share of 5 % from one of 8 %."""
MAX_BYTES_READ = 1024 * MIB
"""Files are read whole, as staging does, so of large files only a few are read."""


def survey_datasets(config: RunConfig, samples: int | None = None) -> tuple[DatasetSize, ...]:
    """The size of every dataset. `samples`: the size of each dataset that is not on this machine; None: unknown."""
    return tuple(_survey_dataset(config, dataset, samples) for dataset in config.datasets)


def _survey_dataset(config: RunConfig, dataset: DatasetSettings, samples: int | None) -> DatasetSize:
    cache_policy = dataset_cache_policy(dataset, config.cache_config)
    # With EACH_EPOCH, entries of the next epoch are made while those of the current one are read.
    variants = {CacheMode.CACHED: 1, CacheMode.EACH_EPOCH: 2, CacheMode.ON_THE_FLY: 0}
    modes = {"media": cache_policy.media_mode, "text": cache_policy.text_mode}
    root = dataset.instance_data_dir
    is_here = root is not None and root.exists()
    result = _inspect_files(dataset, open_source(dataset)) if is_here else _assume_largest_bucket(dataset, samples)
    bucket_counts, stored, captions, explanation = result
    return DatasetSize(
        id=dataset.id,
        in_memory=dataset.type == "in_memory",
        held_out=dataset.held_out,
        bucket_counts=bucket_counts,
        samples=sum(one.samples for one in bucket_counts) or None,
        stored_bytes=stored,
        captions=captions,
        explanation=explanation,
        draws_per_epoch=draws_per_epoch(dataset.repeats, dataset.weight),
        cached_media_variants=variants[cache_policy.media_mode] * cache_policy.media_variations,
        cached_text_variants=variants[cache_policy.text_mode] * cache_policy.text_variations,
        encoded_while_training=tuple(what for what, mode in modes.items() if mode is not CacheMode.CACHED),
    )


SurveyResult = tuple[tuple[BucketCount, ...], int | None, CaptionTotals | None, str]
"""Buckets, bytes of staged files, captions, explanation: as in `DatasetSize`."""


def _assume_largest_bucket(dataset: DatasetSettings, samples: int | None) -> SurveyResult:
    """For a dataset that is not here: all samples are assumed to be in the largest bucket that the settings allow."""
    bucket = largest_bucket(bucket_table(dataset))
    limited = samples if samples is None or dataset.limit is None else min(samples, dataset.limit)
    where = f"{dataset.instance_data_dir} is not on this machine"
    if limited is None:
        return (BucketCount(bucket, 0),), None, None, f"{where}: give its size with --samples N"
    buckets_per_sample = len(dataset.resolution) if dataset.resolution_mode == "each" else 1
    text = f"{where}: --samples {samples}, all assumed to be in the largest bucket, {bucket.label}"
    return (BucketCount(bucket, limited * buckets_per_sample),), None, CaptionTotals(limited, None), text


def _inspect_files(dataset: DatasetSettings, source: DataSource) -> SurveyResult:
    listing = source.list_items()
    facts, broken = probe_some(dataset, source, listing.items)
    inspected_count = len(facts) + len(broken)
    bucket_counts, scale = _count_buckets(dataset, facts, len(listing.items), inspected_count)
    root = dataset.instance_data_dir
    if not bucket_counts:
        bucket = largest_bucket(bucket_table(dataset))
        return (BucketCount(bucket, 0),), None, None, f"{root} holds no {dataset.dataset_type} that fits a bucket"
    stored = sum(fit.stored_bytes(item.nbytes) for item in listing.items)
    stored += fit.overhead_bytes(len(listing.items), listing.key_bytes(), listing.caption_bytes(), 1)
    how = "all were read" if scale == 1 else f"{inspected_count} of them were read"
    explanation = f"{len(listing.items):,} files in {root}; {how}"
    staged = round(stored * len(facts) / max(1, inspected_count))
    return bucket_counts, staged, _count_captions(dataset, listing), explanation


def largest_bucket(buckets: Sequence[Bucket]) -> Bucket:
    """The bucket with the largest volume, which takes the most to encode and to train."""
    return max(buckets, key=lambda bucket: (prod(bucket.shape), bucket))


def probe_some(
    dataset: DatasetSettings, source: DataSource, items: Sequence[SourceItem]
) -> tuple[list[MediaInfo], list[SkippedFile]]:
    """The sizes of up to `MAX_FILES_READ` items, spread evenly over the listing; and those of them that are broken,
    which staging will set aside."""
    facts: list[MediaInfo] = []
    broken: list[SkippedFile] = []
    for item in _pick_evenly(items):
        try:
            content = read_span(item.media) if isinstance(item.media, FileSpan) else source.read_row(item.media)
            facts.append(probe(content, dataset.dataset_type))
        except BrokenMediaError as error:
            broken.append(SkippedFile(item.name, str(error)))
    return facts, broken


def _pick_evenly(items: Sequence[SourceItem]) -> list[SourceItem]:
    """Items spread evenly over the listing, within the limits on files and bytes; at least one."""
    step = max(1, -(-len(items) // MAX_FILES_READ))
    picked: list[SourceItem] = []
    nbytes = 0
    for item in items[::step]:
        nbytes += item.nbytes
        if picked and nbytes > MAX_BYTES_READ:
            break
        picked.append(item)
    return picked


def _count_buckets(
    dataset: DatasetSettings, facts: Sequence[MediaInfo], item_count: int, inspected_count: int
) -> tuple[tuple[BucketCount, ...], float]:
    """Buckets with their samples, scaled from the inspected files to all, and the scale."""
    media_columns = MediaMetadataSlice(
        width=np.array([one.width for one in facts], np.int32),
        height=np.array([one.height for one in facts], np.int32),
        frames=np.array([one.frames for one in facts], np.int32),
        fps=np.array([one.fps for one in facts], np.float32),
        seconds=np.array([one.seconds for one in facts], np.float32),
    )
    table = bucket_table(dataset)
    counts: Counter[Bucket] = Counter()
    for column in bucket_indices(dataset, media_columns):
        counts.update(table[number] for number in column.tolist() if number != NO_BUCKET)
    scale = item_count / inspected_count if inspected_count else 1.0
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return tuple(BucketCount(bucket, max(1, round(count * scale))) for bucket, count in ordered), scale


def _count_captions(dataset: DatasetSettings, listing: SourceListing) -> CaptionTotals:
    """The captions to encode. A dropped caption is the empty one, which is encoded once."""
    settings = dataset.captions
    trigger = 0 if settings.trigger_word is None else len(settings.trigger_word.encode()) + 2
    if settings.source == "constant" or settings.constant is not None:
        return CaptionTotals(1, len((settings.constant or "").encode()) + trigger)
    texts = [_caption_count_and_bytes(item) for item in listing.items]
    count = sum(one for one, _ in texts) + int(settings.dropout > 0)
    return CaptionTotals(count, sum(nbytes for _, nbytes in texts) + trigger * count)


def _caption_count_and_bytes(item: SourceItem) -> tuple[int, int]:
    """The number of an item's captions, and their bytes. A caption file counts as one caption: it is not read."""
    if isinstance(item.caption, FileSpan):
        return 1, max(0, item.caption.nbytes)
    return max(1, len(item.caption or ())), sum(len(text.encode()) for text in item.caption or ())
