"""What a run stores in host memory and on disk: staged files, caches, checkpoints, exports, prefetched batches. Pure.

Each item says where it is stored and what its size was computed from. An unknown size is None, and the item says what
is missing; an upper limit says "at most".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.types import bytes_text
from supertuner.data.ordering.buckets import Bucket
from supertuner.plan.forecast.dataset_sizes import DatasetSize

StorageLocation: TypeAlias = Literal["memory", "disk"]

PAGE_BYTES = 4096
SPECIAL_TOKENS = 2
"""Start and end token of a caption."""
CACHE_ENTRY_OVERHEAD_BYTES = 256
"""Bytes of a cache entry besides its tensors, as in `cache/location.py`."""


@dataclass(frozen=True, slots=True)
class StorageItem:
    """One kind of data that a run stores."""

    what: str
    where: StorageLocation
    nbytes: int | None
    """None: unknown; `how` says why."""
    how: str


@dataclass(frozen=True, slots=True)
class EncodedSizes:
    """Bytes of encoded samples and captions of a model."""

    latent_bytes: Callable[[Bucket], int | None]
    """Bytes of an encoded sample of a bucket; None: this bucket cannot be encoded."""
    token_bytes: int | None
    """Bytes per token of an encoded caption; None: its size is not proportional to its tokens."""
    longest_caption_bytes: int | None
    """Bytes of an encoded caption of the greatest length that the model reads; None: unknown."""


@dataclass(frozen=True, slots=True)
class ExpertStateSizes:
    """Bytes of an expert's trained parameters, their state and their export."""

    expert: str
    parameter_bytes: int
    state_bytes: int
    """Optimizer state and EMA weights."""
    export_bytes: int


def list_storage(
    config: RunConfig,
    datasets: Sequence[DatasetSize],
    sizes: EncodedSizes,
    experts: Sequence[ExpertStateSizes],
    batch_bytes: int | None,
) -> tuple[StorageItem, ...]:
    """Everything that the run stores, from staged files to exports. `batch_bytes`: one micro-batch; None: unknown."""
    cache = config.cache_config
    return (
        *map(_staged_item, datasets),
        *_cache_items("latents", cache.vae_cache_type, cache.persistent_cache, *_latent_cache_size(datasets, sizes)),
        *_cache_items("text", cache.text_cache_type, cache.persistent_cache, *_text_cache_size(datasets, sizes)),
        *_batch_items(config, batch_bytes),
        *_checkpoint_items(config, experts),
    )


def total_storage(items: Iterable[StorageItem], where: StorageLocation) -> tuple[int, bool]:
    """The sum of the known sizes at `where`, and whether all sizes are known."""
    items_there = [part for part in items if part.where == where]
    return sum(part.nbytes or 0 for part in items_there), all(part.nbytes is not None for part in items_there)


def _staged_item(dataset: DatasetSize) -> StorageItem:
    where: StorageLocation = "memory" if dataset.in_memory else "disk"
    return StorageItem(f"datasets[{dataset.id}], staged", where, dataset.stored_bytes, dataset.explanation)


def _latent_cache_size(datasets: Sequence[DatasetSize], sizes: EncodedSizes) -> tuple[int | None, str]:
    nbytes, entries = 0, 0
    for dataset in datasets:
        if dataset.samples is None:
            return None, f"datasets[{dataset.id}]: {dataset.explanation}"
        for bucket_count in dataset.bucket_counts:
            latent_bytes = sizes.latent_bytes(bucket_count.bucket)
            if latent_bytes is None:
                return None, f"datasets[{dataset.id}]: the model cannot take {bucket_count.bucket.label}"
            nbytes += bucket_count.samples * dataset.cached_media_variants * _cache_entry_bytes(latent_bytes)
            entries += bucket_count.samples * dataset.cached_media_variants
    return nbytes, f"{entries:,} encoded samples"


def _text_cache_size(datasets: Sequence[DatasetSize], sizes: EncodedSizes) -> tuple[int | None, str]:
    if sizes.longest_caption_bytes is None:
        return None, "the size of an encoded caption is not known for this model"
    nbytes, entries, assumes_longest = 0, 0, False
    for dataset in datasets:
        captions = dataset.captions
        if captions is None:
            return None, f"datasets[{dataset.id}]: {dataset.explanation}"
        max_bytes = captions.count * _cache_entry_bytes(sizes.longest_caption_bytes)
        if captions.total_bytes is None or sizes.token_bytes is None:
            assumes_longest = True
        else:
            tokens = captions.total_bytes + captions.count * SPECIAL_TOKENS
            max_bytes = min(
                max_bytes, tokens * sizes.token_bytes + captions.count * (PAGE_BYTES + CACHE_ENTRY_OVERHEAD_BYTES)
            )
        nbytes += max_bytes * dataset.cached_text_variants
        entries += captions.count * dataset.cached_text_variants
    bound = "at most: each of the greatest length" if assumes_longest else "at most: one token per byte of text"
    return nbytes, f"{entries:,} captions; {bound}"


def _cache_items(what: str, kind: str, persistent: bool, nbytes: int | None, how: str) -> list[StorageItem]:
    if kind == "none":
        return []
    items = [StorageItem(f"cache of {what}", "memory" if kind == "unified_memory" else "disk", nbytes, how)]
    if persistent and kind == "unified_memory":
        items.append(StorageItem(f"cache of {what}, persistent", "disk", nbytes, "cache_config.persistent_cache"))
    return items


def _batch_items(config: RunConfig, batch_bytes: int | None) -> list[StorageItem]:
    ahead = config.loader.batches_ahead + 1
    nbytes = None if batch_bytes is None else ahead * batch_bytes
    return [StorageItem("prefetched batches", "memory", nbytes, f"{ahead} micro-batches in pinned memory")]


def _checkpoint_items(config: RunConfig, experts: Sequence[ExpertStateSizes]) -> list[StorageItem]:
    checkpoint_bytes = sum(one.parameter_bytes + one.state_bytes for one in experts)
    count = config.checkpoints.keep + 1
    exports = sum(one.export_bytes for one in experts)
    text = f"{count} of {bytes_text(checkpoint_bytes)}: the last {config.checkpoints.keep}, and one being written"
    return [
        StorageItem("checkpoints", "disk", count * checkpoint_bytes, text),
        StorageItem("exports", "disk", exports, "the trained weights"),
    ]


def _cache_entry_bytes(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES + CACHE_ENTRY_OVERHEAD_BYTES
