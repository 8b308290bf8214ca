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
from supertuner.memory.driver import Kind, Span

LIGHT_SHARE: Final = 0.01
"""Of GPU memory: less free managed memory than this is left alone."""
LIGHT_EVERY_STEPS: Final = 100
"""Without discarding, dead pages are carried home at most this often."""
HARD_SHARE: Final = 0.05
"""Of GPU memory: a pool whose cache holds less than this is not rebuilt."""
HARD_EVERY_STEPS: Final = 100
"""A rebuilt pool allocates every segment anew, which a step feels."""
BLOAT: Final = 1.5
"""Reserved memory as a multiple of what was ever in use at once."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of a pool, as torch's snapshot and the plugin describe it."""

    span: Span
    kind: Kind
    free: tuple[Span, ...]
    """Blocks that hold nothing and that no stream still uses."""

    @property
    def free_bytes(self) -> int:
        return sum(span.nbytes for span in self.free)


@dataclass(frozen=True, slots=True)
class Situation:
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


def segments_of(snapshot: Sequence[Mapping[str, Any]], kind_of: Callable[[int], Kind | None]) -> tuple[Segment, ...]:
    """The plugin's segments in `torch.cuda.memory_snapshot`; those of others are left out."""
    found = []
    for one in snapshot:
        kind = kind_of(one["address"])
        if kind is not None:
            free = tuple(Span(b["address"], b["size"]) for b in one["blocks"] if b["state"] == "inactive")
            found.append(Segment(Span(one["address"], one["total_size"]), kind, free))
    return tuple(found)


def cold_spans(segments: Sequence[Segment], page_bytes: int) -> tuple[Span, ...]:
    """Whole pages of managed memory that hold nothing. A page that a live tensor reaches into is not among them."""
    spans = []
    for segment in segments:
        for block in segment.free if segment.kind is Kind.MANAGED else ():
            begin, end = -(-block.address // page_bytes) * page_bytes, block.end // page_bytes * page_bytes
            if end > begin:
                spans.append(Span(begin, end - begin))
    return tuple(spans)


def light_reason(now: Situation) -> str | None:
    """Why cold managed memory should be taken off the GPU now; None: it should not."""
    if now.stage != 2 or not now.cold_bytes or now.cold_bytes < LIGHT_SHARE * now.total_bytes:
        return None
    if not now.used_since_light:
        return None
    if now.can_discard:
        return "free in the cache, so its contents are worthless"
    if now.steps_since_light is not None and now.steps_since_light < LIGHT_EVERY_STEPS:
        return None
    return "free in the cache; this driver cannot discard it, so it is sent home"


def hard_reason(now: Situation) -> str | None:
    """Why the pools should be rebuilt now; None: they should not."""
    if not now.cached_bytes or now.cached_bytes < HARD_SHARE * now.total_bytes:
        return None
    if now.refused:
        return f"an allocation was refused while the cache held {bytes_text(now.cached_bytes)}"
    if now.steps_since_hard is not None and now.steps_since_hard < HARD_EVERY_STEPS:
        return None
    if now.reserved_bytes > BLOAT * now.peak_bytes:
        return (
            f"{bytes_text(now.reserved_bytes)} are held, and never more than {bytes_text(now.peak_bytes)} were in use"
        )
    room = now.gpu_free_bytes - now.needed_free_bytes
    if now.cold_bytes >= HARD_SHARE * now.total_bytes and room >= now.cold_bytes:
        return f"the GPU has room again for the {bytes_text(now.cold_bytes)} that spilled"
    return None
