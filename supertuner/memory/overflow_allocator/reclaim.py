"""Decides when to reclaim memory of the overflow allocator, and which; decisions over a snapshot. Pure.

Light reclaim: memory that torch's cache holds free in managed memory has worthless content. If it is discarded, it
takes no GPU memory and is not transferred over the link only to be overwritten. Without the discard call (before CUDA
13) it can only be prefetched to the host, which costs as much link traffic as it saves, so this happens rarely. Hard
reclaim: the pools are dropped and rebuilt, because they hold far more than was ever in use at once, because an
allocation was refused while the cache held memory, or because the spilled memory would fit into GPU memory again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from supertuner.core.types import bytes_text
from supertuner.memory.driver import AddressRange, MemoryKind
from supertuner.memory.hints.page_ranges import whole_pages_inside

LIGHT_MIN_SHARE: Final = 0.01
"""Share of GPU memory below which free managed memory is left alone."""
LIGHT_EVERY_STEPS: Final = 100
"""Minimum steps between two light reclaims without the discard call."""
HARD_MIN_SHARE: Final = 0.05
"""Share of GPU memory that the cache of a pool must hold before the pool is rebuilt."""
HARD_EVERY_STEPS: Final = 100
"""Minimum steps between two rebuilds: a rebuilt pool allocates every segment again, which slows a step."""
MAX_BLOAT: Final = 1.5
"""Maximum reserved memory as a multiple of the peak in use."""


@dataclass(frozen=True, slots=True)
class PoolSegment:
    """One segment of a pool, from torch's snapshot and the plugin."""

    span: AddressRange
    kind: MemoryKind
    free_blocks: tuple[AddressRange, ...]
    """Blocks that are free and not in use by any stream."""

    @property
    def free_bytes(self) -> int:
        return sum(span.nbytes for span in self.free_blocks)


@dataclass(frozen=True, slots=True)
class PoolState:
    """The inputs of both decisions."""

    stage: int
    total_bytes: int
    gpu_free_bytes: int
    needed_free_bytes: int
    """GPU memory that must be free before the plugin allocates device memory again: the reserve and the margin."""
    reserved_bytes: int
    cached_bytes: int
    """Of the reserved bytes, those in free blocks."""
    cold_bytes: int
    """Of the cached bytes, those in managed memory, in whole pages."""
    peak_bytes: int
    """Peak of the bytes in use."""
    refused: bool
    """Whether an allocation was refused since the end of the last step."""
    used_since_light: bool
    """Whether torch allocated memory since the last light reclaim, so that discarded pages may be back on the GPU."""
    can_discard: bool
    steps_since_light: int | None
    steps_since_hard: int | None
    """None: never so far."""


def plugin_segments(
    snapshot: Sequence[Mapping[str, Any]], kind_of: Callable[[int], MemoryKind | None]
) -> tuple[PoolSegment, ...]:
    """The plugin's segments in `torch.cuda.memory_snapshot`, without those of other allocators."""
    segments = []
    for segment in snapshot:
        kind = kind_of(segment["address"])
        if kind is not None:
            free = tuple(AddressRange(b["address"], b["size"]) for b in segment["blocks"] if b["state"] == "inactive")
            segments.append(PoolSegment(AddressRange(segment["address"], segment["total_size"]), kind, free))
    return tuple(segments)


def free_managed_ranges(segments: Sequence[PoolSegment], page_bytes: int) -> tuple[AddressRange, ...]:
    """Whole free pages of managed memory. A page that a live tensor reaches into is excluded."""
    managed = (segment for segment in segments if segment.kind is MemoryKind.MANAGED)
    return whole_pages_inside((block for segment in managed for block in segment.free_blocks), page_bytes)


def light_reclaim_reason(state: PoolState) -> str | None:
    """Why free managed memory should be removed from the GPU now; None if it should not."""
    if state.stage != 2 or not state.cold_bytes or state.cold_bytes < LIGHT_MIN_SHARE * state.total_bytes:
        return None
    # Nothing was allocated since the last light reclaim, so the pages that it removed are still off the GPU.
    if not state.used_since_light:
        return None
    if state.can_discard:
        return "free in the cache, so its content is worthless"
    if state.steps_since_light is not None and state.steps_since_light < LIGHT_EVERY_STEPS:
        return None
    return "free in the cache; this driver cannot discard it, so it is moved to the host"


def hard_reclaim_reason(state: PoolState) -> str | None:
    """Why the pools should be rebuilt now; None if they should not."""
    if not state.cached_bytes or state.cached_bytes < HARD_MIN_SHARE * state.total_bytes:
        return None
    # A refusal overrides the minimum interval: the next one may end the run.
    if state.refused:
        return f"an allocation was refused while the cache held {bytes_text(state.cached_bytes)}"
    if state.steps_since_hard is not None and state.steps_since_hard < HARD_EVERY_STEPS:
        return None
    if state.reserved_bytes > MAX_BLOAT * state.peak_bytes:
        reserved, peak = bytes_text(state.reserved_bytes), bytes_text(state.peak_bytes)
        return f"{reserved} are reserved, and at most {peak} were in use at once"
    # Rebuilding pays off only if all spilled memory fits above reserve and margin; otherwise stage 2 would begin again.
    free_bytes = state.gpu_free_bytes - state.needed_free_bytes
    if state.cold_bytes >= HARD_MIN_SHARE * state.total_bytes and free_bytes >= state.cold_bytes:
        return f"the GPU has room again for the {bytes_text(state.cold_bytes)} that spilled"
    return None
