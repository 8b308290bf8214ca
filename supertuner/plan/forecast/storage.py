"""What a run stores in host memory and on disk: staged files, caches, checkpoints, exports, prefetched batches. Pure.

Each item says where it is stored and what its size was computed from. An unknown size is None, and the item says what
is missing; an upper limit says "at most".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from supertuner.arena.home import default_home
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


PREFETCHED = "prefetched batches"
STAGED_PREFIX, CACHE_PREFIX = "datasets[", "cache of "


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

    latent_bytes: Callable[[Bucket], int]
    """Bytes of an encoded sample of a bucket."""
    token_bytes: int | None
    """Bytes per token of an encoded caption; None: its size is not proportional to its tokens."""
    longest_caption_bytes: int
    """Bytes of an encoded caption of the greatest length that the model reads."""


@dataclass(frozen=True, slots=True)
class ExpertStateSizes:
    """Bytes of an expert's trained parameters, their state and their export."""

    parameter_bytes: int
    state_bytes: int
    """Optimizer state and EMA weights."""
    export_bytes: int


def list_storage(
    config: RunConfig,
    datasets: Sequence[DatasetSize],
    sizes: EncodedSizes,
    experts: Sequence[ExpertStateSizes],
    batch_bytes: int,
    total_steps: int | None,
) -> tuple[StorageItem, ...]:
    """Everything that the run stores, from staged files to exports. `batch_bytes`: one micro-batch; `total_steps`: None
    if unknown."""
    cache, ahead = config.cache_config, config.loader.batches_ahead + 1
    batches = f"{ahead} micro-batches in pinned memory"
    return (
        *map(_staged_item, datasets),
        *_cache_items("latents", cache.vae_cache_type, cache.persistent_cache, *_latent_cache_size(datasets, sizes)),
        *_cache_items("text", cache.text_cache_type, cache.persistent_cache, *_text_cache_size(datasets, sizes)),
        StorageItem(PREFETCHED, "memory", ahead * batch_bytes, batches),
        *_checkpoint_items(config, experts),
        *_export_items(config, experts, total_steps),
    )


def total_storage(items: Iterable[StorageItem], where: StorageLocation) -> tuple[int, bool]:
    """The sum of the known sizes at `where`, and whether all sizes are known."""
    items_there = [part for part in items if part.where == where]
    return sum(part.nbytes or 0 for part in items_there), all(part.nbytes is not None for part in items_there)


def storage_folder(item: StorageItem, config: RunConfig) -> Path | None:
    """The folder at or below which an item is stored; None: in memory of the process."""
    if item.what == PREFETCHED:
        return None
    if item.where == "memory":
        return config.arena.home or default_home()
    if item.what.startswith(STAGED_PREFIX):
        return config.arena.disk_home or config.run.output_dir
    if item.what.startswith(CACHE_PREFIX) and config.cache_config.persistent_cache:
        return config.cache_config.cache_dir or config.run.output_dir
    return config.run.output_dir


def _staged_item(dataset: DatasetSize) -> StorageItem:
    where: StorageLocation = "memory" if dataset.in_memory else "disk"
    return StorageItem(f"{STAGED_PREFIX}{dataset.id}], staged", where, dataset.stored_bytes, dataset.explanation)


def _latent_cache_size(datasets: Sequence[DatasetSize], sizes: EncodedSizes) -> tuple[int | None, str]:
    nbytes, entries = 0, 0
    for dataset in datasets:
        if dataset.samples is None:
            return None, f"datasets[{dataset.id}]: {dataset.explanation}"
        for filled in dataset.bucket_counts:
            count = filled.samples * dataset.cached_media_variants
            nbytes += count * _cache_entry_bytes(sizes.latent_bytes(filled.bucket))
            entries += count
    return nbytes, f"{entries:,} encoded samples"


def _text_cache_size(datasets: Sequence[DatasetSize], sizes: EncodedSizes) -> tuple[int | None, str]:
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
            overhead = captions.count * (PAGE_BYTES + CACHE_ENTRY_OVERHEAD_BYTES)
            max_bytes = min(max_bytes, tokens * sizes.token_bytes + overhead)
        nbytes += max_bytes * dataset.cached_text_variants
        entries += captions.count * dataset.cached_text_variants
    bound = "at most: each of the greatest length" if assumes_longest else "at most: one token per byte of text"
    return nbytes, f"{entries:,} captions; {bound}"


def _cache_items(what: str, kind: str, persistent: bool, nbytes: int | None, how: str) -> list[StorageItem]:
    if kind == "none":
        return []
    items = [StorageItem(f"{CACHE_PREFIX}{what}", "memory" if kind == "unified_memory" else "disk", nbytes, how)]
    if persistent and kind == "unified_memory":
        items.append(StorageItem(f"{CACHE_PREFIX}{what}, persistent", "disk", nbytes, "cache_config.persistent_cache"))
    return items


def _checkpoint_items(config: RunConfig, experts: Sequence[ExpertStateSizes]) -> list[StorageItem]:
    checkpoint_bytes = sum(one.parameter_bytes + one.state_bytes for one in experts)
    count = config.checkpoints.keep + 1
    text = f"{count} of {bytes_text(checkpoint_bytes)}: the last {config.checkpoints.keep}, and one being written"
    return [StorageItem("checkpoints", "disk", count * checkpoint_bytes, text)]


def _export_items(config: RunConfig, experts: Sequence[ExpertStateSizes], total_steps: int | None) -> list[StorageItem]:
    exports, every, is_adapter = config.exports, config.checkpoints.every_steps, config.adapter.type != "full"
    if config.exports_when == "never":
        return []
    files = 1 if not is_adapter else len(exports.formats) * (2 if config.exports_both_weights else 1)
    nbytes = files * sum(one.export_bytes for one in experts)
    if config.exports_when == "end" or not every:
        return [StorageItem("exports", "disk", nbytes, "the trained weights, after the last step")]
    count = None if total_steps is None else -(-total_steps // every)
    if exports.keep is not None and (count is None or exports.keep < count):
        text = f"{exports.keep + 1} of {bytes_text(nbytes)}: the last {exports.keep}, and one being written"
        return [StorageItem("exports", "disk", (exports.keep + 1) * nbytes, text)]
    if count is None:
        how = f"{bytes_text(nbytes)} for each {every} steps, whose number is unknown"
        return [StorageItem("exports", "disk", None, how)]
    return [
        StorageItem("exports", "disk", count * nbytes, f"{count} of {bytes_text(nbytes)}: one with each checkpoint")
    ]


def _cache_entry_bytes(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES + CACHE_ENTRY_OVERHEAD_BYTES
