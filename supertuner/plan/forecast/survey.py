"""Looks at a run's datasets without staging them: files are listed, the headers of some are read, nothing is written.

Of many files as many are read as tell their shapes well; the others are taken to be spread alike. A dataset that is
not on this machine is as large as the user says, or unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

import numpy as np

from supertuner.config.settings.data import Dataset
from supertuner.config.settings.tree import RunConfig
from supertuner.core.errors import BrokenMedia
from supertuner.core.types import MIB
from supertuner.data.cache_policy import How, treatment
from supertuner.data.ordering.assign import Block, bucket_numbers, bucket_table
from supertuner.data.ordering.buckets import NO_BUCKET, Bucket
from supertuner.data.ordering.order import rate_of
from supertuner.data.probe import probe
from supertuner.data.probe.facts import Facts
from supertuner.data.sources import open_source
from supertuner.data.sources.listing import Item, Listing, Source, Span
from supertuner.data.staging import budget as fit
from supertuner.data.staging.reading import read_span
from supertuner.plan.forecast.dataset_sizes import Captions, Filled, Holding

MOST_FILES = 400
"""Headers that are read: enough to tell a share of 5 % from one of 8 %."""
MOST_BYTES = 1024 * MIB
"""Whole files are read, as staging does; of large ones only a few."""


def survey(config: RunConfig, samples: int | None = None) -> tuple[Holding, ...]:
    """Every dataset; `samples` is the size of those that are not here."""
    return tuple(_holding(config, dataset, samples) for dataset in config.datasets)


def _holding(config: RunConfig, dataset: Dataset, samples: int | None) -> Holding:
    treated = treatment(dataset, config.cache_config)
    turns = {How.CACHED: 1, How.EACH_EPOCH: 2, How.AT_USE: 0}  # an epoch's entries are made while the last one's serve
    root = dataset.instance_data_dir
    here = root is not None and root.exists()
    found = _seen(dataset, open_source(dataset)) if here else _unseen(dataset, samples)
    filled, count, stored, captions, known = found
    return Holding(
        id=dataset.id,
        in_memory=dataset.type == "in_memory",
        held_out=dataset.held_out,
        filled=filled,
        samples=count,
        stored_bytes=stored,
        captions=captions,
        known=known,
        rate=rate_of(dataset.repeats, dataset.weight),
        media_turns=turns[treated.media] * treated.media_turns,
        text_turns=turns[treated.text] * treated.text_turns,
        encodes=tuple(
            what for what, how in (("media", treated.media), ("text", treated.text)) if how is not How.CACHED
        ),
    )


Found = tuple[tuple[Filled, ...], int | None, int | None, Captions | None, str]


def _unseen(dataset: Dataset, samples: int | None) -> Found:
    """Nothing to look at: all samples are taken to be in the largest bucket that the settings allow."""
    bucket = largest(bucket_table(dataset))
    limited = samples if samples is None or dataset.limit is None else min(samples, dataset.limit)
    where = f"{dataset.instance_data_dir} is not on this machine"
    if limited is None:
        return (Filled(bucket, 0),), None, None, None, f"{where}: say --samples N"
    each = len(dataset.resolution) if dataset.resolution_mode == "each" else 1
    text = f"{where}: --samples {samples}, all taken to be of the largest bucket, {bucket.label}"
    return (Filled(bucket, limited * each),), limited * each, None, Captions(limited, None), text


def _seen(dataset: Dataset, source: Source) -> Found:
    listing = source.listing()
    looked_at = _spread(listing.items)
    facts = [one for item in looked_at if (one := _facts(item, source, dataset)) is not None]
    filled, share = _filled(dataset, facts, len(listing.items), len(looked_at))
    root = dataset.instance_data_dir
    if not filled:
        bucket = largest(bucket_table(dataset))
        return (Filled(bucket, 0),), None, None, None, f"{root} holds no {dataset.dataset_type} that fits a bucket"
    stored = sum(fit.stored_bytes(item.nbytes) for item in listing.items)
    stored += fit.overhead_bytes(len(listing.items), listing.key_bytes(), listing.caption_bytes(), 1)
    count = sum(one.samples for one in filled)
    how = "each was looked at" if share == 1 else f"{len(looked_at)} of them were looked at"
    known = f"{len(listing.items):,} files in {root}; {how}"
    return filled, count, round(stored * len(facts) / max(1, len(looked_at))), _captions(dataset, listing), known


def largest(buckets: Sequence[Bucket]) -> Bucket:
    """By what it takes to encode and to train: its volume."""
    return max(buckets, key=lambda bucket: (prod(bucket.shape), bucket))


def _spread(items: Sequence[Item]) -> list[Item]:
    """Evenly over the listing, as many as are few enough and small enough."""
    step = max(1, -(-len(items) // MOST_FILES))
    picked: list[Item] = []
    nbytes = 0
    for item in items[::step]:
        nbytes += item.nbytes
        if picked and nbytes > MOST_BYTES:
            break
        picked.append(item)
    return picked


def _facts(item: Item, source: Source, dataset: Dataset) -> Facts | None:
    """None: staging will set the file aside."""
    try:
        content = read_span(item.media) if isinstance(item.media, Span) else source.payload(item.media)
        return probe(content, dataset.dataset_type)
    except BrokenMedia:
        return None  # `supertuner stage` says what is wrong with it


def _filled(dataset: Dataset, facts: Sequence[Facts], items: int, looked_at: int) -> tuple[tuple[Filled, ...], float]:
    """Buckets with their samples; what was seen of some files stands for all of them."""
    block = Block(
        width=np.array([one.width for one in facts], np.int32),
        height=np.array([one.height for one in facts], np.int32),
        frames=np.array([one.frames for one in facts], np.int32),
        fps=np.array([one.fps for one in facts], np.float32),
        seconds=np.array([one.seconds for one in facts], np.float32),
    )
    table = bucket_table(dataset)
    counts: Counter[Bucket] = Counter()
    for column in bucket_numbers(dataset, block):
        counts.update(table[number] for number in column.tolist() if number != NO_BUCKET)
    scale = items / looked_at if looked_at else 1.0
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return tuple(Filled(bucket, max(1, round(count * scale))) for bucket, count in ordered), scale


def _captions(dataset: Dataset, listing: Listing) -> Captions:
    """One that is dropped is the empty one, and is encoded once."""
    settings = dataset.captions
    trigger = 0 if settings.trigger_word is None else len(settings.trigger_word.encode()) + 2
    if settings.source == "constant" or settings.constant is not None:
        return Captions(1, len((settings.constant or "").encode()) + trigger)
    texts = [_caption(item) for item in listing.items]
    count = sum(one for one, _ in texts) + int(settings.dropout > 0)
    return Captions(count, sum(nbytes for _, nbytes in texts) + trigger * count)


def _caption(item: Item) -> tuple[int, int]:
    """How many captions an item has, and their bytes. A file counts as one: how many are in it is not looked at."""
    if isinstance(item.caption, Span):
        return 1, max(0, item.caption.nbytes)
    return max(1, len(item.caption or ())), sum(len(text.encode()) for text in item.caption or ())
