"""What a run stores beside the GPU: staged files, caches, checkpoints, exports, batches on their way. Pure arithmetic.

Each line says whether it lies in host memory or on a disk, and what it was worked out from. A size that is not known is
None and says what is missing; one that is a bound says "at most".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from supertuner.config.settings.tree import RunConfig
from supertuner.core.types import bytes_text
from supertuner.data.ordering.buckets import Bucket
from supertuner.plan.forecast.dataset_sizes import Holding

Where: TypeAlias = Literal["memory", "disk"]

PAGE = 4096
ENDS = 2
"""Tokens of a caption beside those of its letters: where it begins, and where it ends."""
UNIT_BYTES = 256
"""What an entry of a cache takes beside its tensors; as `cache/capacity.py` counts."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Something that a run keeps."""

    what: str
    where: Where
    nbytes: int | None
    """None: not known; `how` says why."""
    how: str


@dataclass(frozen=True, slots=True)
class Sizes:
    """What encoded samples and captions of a model take, by their shape."""

    latents: Callable[[Bucket], int | None]
    """Bytes of the encoded sample; None: this bucket cannot be encoded."""
    token_bytes: int | None
    """Of an encoded caption, for each of its tokens; None: it is not made of tokens."""
    longest_text: int | None
    """Bytes of the longest caption that the model reads; None: not known."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What is trained of one expert, and what is kept about it."""

    expert: str
    parameter_bytes: int
    state_bytes: int
    """The optimizer's, and of averages."""
    export_bytes: int


def stored(
    config: RunConfig,
    holdings: Sequence[Holding],
    sizes: Sizes,
    trained: Sequence[Trained],
    batch_bytes: int | None,
) -> tuple[Stored, ...]:
    """Everything, from the files to the exports."""
    cache = config.cache_config
    return (
        *map(_staged, holdings),
        *_cached("latents", cache.vae_cache_type, cache.persistent_cache, *_latents(holdings, sizes)),
        *_cached("text", cache.text_cache_type, cache.persistent_cache, *_text(holdings, sizes)),
        *_batches(config, batch_bytes),
        *_kept(config, trained),
    )


def together(parts: Iterable[Stored], where: Where) -> tuple[int, bool]:
    """Bytes of what is known there, and whether all of it is."""
    mine = [part for part in parts if part.where == where]
    return sum(part.nbytes or 0 for part in mine), all(part.nbytes is not None for part in mine)


def _staged(holding: Holding) -> Stored:
    where: Where = "memory" if holding.in_memory else "disk"
    return Stored(f"datasets[{holding.id}], staged", where, holding.stored_bytes, holding.known)


def _latents(holdings: Sequence[Holding], sizes: Sizes) -> tuple[int | None, str]:
    nbytes, entries = 0, 0
    for holding in holdings:
        if holding.samples is None:
            return None, f"datasets[{holding.id}]: {holding.known}"
        for filled in holding.filled:
            each = sizes.latents(filled.bucket)
            if each is None:
                return None, f"datasets[{holding.id}]: the model cannot take {filled.bucket.label}"
            nbytes += filled.samples * holding.media_turns * _entry(each)
            entries += filled.samples * holding.media_turns
    return nbytes, f"{entries:,} encoded samples"


def _text(holdings: Sequence[Holding], sizes: Sizes) -> tuple[int | None, str]:
    if sizes.longest_text is None:
        return None, "what a caption becomes is not known of this model"
    nbytes, entries, longest = 0, 0, False
    for holding in holdings:
        captions = holding.captions
        if captions is None:
            return None, f"datasets[{holding.id}]: {holding.known}"
        most = captions.count * _entry(sizes.longest_text)
        if captions.total_bytes is None or sizes.token_bytes is None:
            longest = True
        else:
            tokens = captions.total_bytes + captions.count * ENDS
            most = min(most, tokens * sizes.token_bytes + captions.count * (PAGE + UNIT_BYTES))
        nbytes += most * holding.text_turns
        entries += captions.count * holding.text_turns
    bound = "at most: each as long as the model reads" if longest else "at most: a token for each of their bytes"
    return nbytes, f"{entries:,} captions; {bound}"


def _cached(what: str, kind: str, persistent: bool, nbytes: int | None, how: str) -> list[Stored]:
    if kind == "none":
        return []
    found = [Stored(f"cache of {what}", "memory" if kind == "unified_memory" else "disk", nbytes, how)]
    if persistent and kind == "unified_memory":
        found.append(Stored(f"cache of {what}, kept", "disk", nbytes, "cache_config.persistent_cache"))
    return found


def _batches(config: RunConfig, batch_bytes: int | None) -> list[Stored]:
    ahead = config.loader.ahead + 1
    nbytes = None if batch_bytes is None else ahead * batch_bytes
    return [Stored("batches on their way", "memory", nbytes, f"{ahead} micro-batches, in memory that the GPU reads")]


def _kept(config: RunConfig, trained: Sequence[Trained]) -> list[Stored]:
    each = sum(one.parameter_bytes + one.state_bytes for one in trained)
    count = config.checkpoints.keep + 1
    exports = sum(one.export_bytes for one in trained)
    text = f"{count} of {bytes_text(each)}: the last {config.checkpoints.keep}, and one that is being written"
    return [Stored("checkpoints", "disk", count * each, text), Stored("exports", "disk", exports, "what was trained")]


def _entry(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE + UNIT_BYTES
