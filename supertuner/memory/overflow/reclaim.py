"""When memory that the overflow allocator handed out is worth taking back, and which: decisions over a snapshot. Pure.

Light: what torch's cache holds free in managed memory has worthless contents. Discarded, it takes no GPU memory, and is
not carried over the link only to be overwritten; without that call (before CUDA 13) it can only be sent home, which
costs the link as much as it saves, so that is done seldom. Hard: the pools are dropped and begun anew, because they
hold far more than was ever needed at once, because a refusal showed that the cache stood in the way, or because what
spilled would fit the GPU again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from supertuner.core.types import bytes_text
from supertuner.memory.driver import AddressRange, MemoryKind

LIGHT_MIN_SHARE: Final = 0.01
"""Of GPU memory: less free managed memory than this is left alone."""
LIGHT_EVERY_STEPS: Final = 100
"""Without discarding, dead pages are carried home at most this often."""
HARD_MIN_SHARE: Final = 0.05
"""Of GPU memory: a pool whose cache holds less than this is not rebuilt."""
HARD_EVERY_STEPS: Final = 100
"""A rebuilt pool allocates every segment anew, which a step feels."""
MAX_BLOAT: Final = 1.5
"""Reserved memory as a multiple of what was ever in use at once."""


@dataclass(frozen=True, slots=True)
class PoolSegment:
    """One segment of a pool, as torch's snapshot and the plugin describe it."""

    span: AddressRange
    kind: MemoryKind
    free_blocks: tuple[AddressRange, ...]
    """Blocks that hold nothing and that no stream still uses."""

    @property
    def free_bytes(self) -> int:
        return sum(span.nbytes for span in self.free_blocks)


@dataclass(frozen=True, slots=True)
class PoolState:
    """Everything the two decisions depend on."""

    stage: int
    total_bytes: int
    gpu_free_bytes: int
    needed_free_bytes: int
    """GPU memory that must be free before device memory is given again: the reserve and the margin."""
    reserved_bytes: int
    cached_bytes: int
    """Of the reserved bytes, those that hold nothing."""
    cold_bytes: int
    """Of the cached bytes, those in managed memory, in whole pages."""
    peak_bytes: int
    """The most that was ever in use at once."""
    refused: bool
    """An allocation was refused since the last step's end."""
    used_since_light: bool
    """Torch handed out memory since the last time, so what was taken off the GPU then may be back."""
    can_discard: bool
    steps_since_light: int | None
    steps_since_hard: int | None
    """None: never yet."""


def plugin_segments(
    snapshot: Sequence[Mapping[str, Any]], kind_of: Callable[[int], MemoryKind | None]
) -> tuple[PoolSegment, ...]:
    """The plugin's segments in `torch.cuda.memory_snapshot`; those of others are left out."""
    segments = []
    for segment in snapshot:
        kind = kind_of(segment["address"])
        if kind is not None:
            free = tuple(AddressRange(b["address"], b["size"]) for b in segment["blocks"] if b["state"] == "inactive")
            segments.append(PoolSegment(AddressRange(segment["address"], segment["total_size"]), kind, free))
    return tuple(segments)


def free_managed_ranges(segments: Sequence[PoolSegment], page_bytes: int) -> tuple[AddressRange, ...]:
    """Whole pages of managed memory that hold nothing. A page that a live tensor reaches into is not among them."""
    spans = []
    for segment in segments:
        for block in segment.free_blocks if segment.kind is MemoryKind.MANAGED else ():
            begin, end = -(-block.address // page_bytes) * page_bytes, block.end // page_bytes * page_bytes
            if end > begin:
                spans.append(AddressRange(begin, end - begin))
    return tuple(spans)


def light_reclaim_reason(state: PoolState) -> str | None:
    """Why cold managed memory should be taken off the GPU now; None: it should not."""
    if state.stage != 2 or not state.cold_bytes or state.cold_bytes < LIGHT_MIN_SHARE * state.total_bytes:
        return None
    if not state.used_since_light:
        return None
    if state.can_discard:
        return "free in the cache, so its contents are worthless"
    if state.steps_since_light is not None and state.steps_since_light < LIGHT_EVERY_STEPS:
        return None
    return "free in the cache; this driver cannot discard it, so it is sent home"


def hard_reclaim_reason(state: PoolState) -> str | None:
    """Why the pools should be rebuilt now; None: they should not."""
    if not state.cached_bytes or state.cached_bytes < HARD_MIN_SHARE * state.total_bytes:
        return None
    if state.refused:
        return f"an allocation was refused while the cache held {bytes_text(state.cached_bytes)}"
    if state.steps_since_hard is not None and state.steps_since_hard < HARD_EVERY_STEPS:
        return None
    if state.reserved_bytes > MAX_BLOAT * state.peak_bytes:
        return f"{bytes_text(state.reserved_bytes)} are held, and never more than {bytes_text(state.peak_bytes)} were in use"
    free_bytes = state.gpu_free_bytes - state.needed_free_bytes
    if state.cold_bytes >= HARD_MIN_SHARE * state.total_bytes and free_bytes >= state.cold_bytes:
        return f"the GPU has room again for the {bytes_text(state.cold_bytes)} that spilled"
    return None
