"""Computes the whole pages that belong to a tensor alone, which a hint can cover without affecting other memory.

A view covers its own bytes, not its storage. Ranges are rounded inward to pages, so that a page with a single byte of
something else is excluded. Pure functions over (address, itemsize, shape, strides), and functions that read these from
a tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from supertuner.memory.driver import AddressRange

if TYPE_CHECKING:
    import torch

Pieces: TypeAlias = tuple[AddressRange, ...]

MAX_PIECES: Final = 1024
"""Maximum number of contiguous pieces of a view that is hinted: each would be a driver call."""


@dataclass(frozen=True, slots=True)
class StridedLayout:
    """The positions of a strided tensor's elements. Strides count elements and are not negative."""

    address: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> AddressRange:
        """From the first byte to the last. Bytes of other tensors may lie in between."""
        if 0 in self.shape:
            return AddressRange(self.address, 0)
        reach = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return AddressRange(self.address, (reach + 1) * self.itemsize)


@dataclass(frozen=True, slots=True)
class TooManyPieces:
    """A view with too many pieces to be hinted."""

    pieces: int


@dataclass(frozen=True, slots=True)
class NoAddress:
    """A tensor without addressable memory, and why."""

    reason: str


def whole_pages(layout: StridedLayout, page_bytes: int, max_pieces: int = MAX_PIECES) -> Pieces | TooManyPieces:
    """The pages that hold only bytes of this view, as ranges in order of address."""
    ranges = contiguous_pieces(layout, max_pieces)
    if not isinstance(ranges, TooManyPieces):
        return whole_pages_inside(ranges, page_bytes)
    # If even two adjacent pieces cannot fill a page, there is no whole page, so the pieces need not be enumerated.
    return () if 2 * _contiguous_run(layout)[0] < page_bytes else ranges


def contiguous_pieces(layout: StridedLayout, max_pieces: int = MAX_PIECES) -> Pieces | TooManyPieces:
    """The bytes of a view as the fewest contiguous ranges, in order of address."""
    if 0 in layout.shape:
        return ()
    run_bytes, outer = _contiguous_run(layout)
    count = math.prod(n for n, _ in outer)
    if count > max_pieces:
        return TooManyPieces(count)
    steps = itertools.product(*(range(0, n * stride, stride) for n, stride in outer))
    starts = sorted(layout.address + sum(step) for step in steps)
    return _merge_adjacent(AddressRange(start, run_bytes) for start in starts)


def whole_pages_inside(spans: Iterable[AddressRange], page_bytes: int) -> Pieces:
    """The whole pages inside each range."""
    pages = []
    for span in spans:
        first, end = -(-span.address // page_bytes) * page_bytes, span.end // page_bytes * page_bytes
        if end > first:
            pages.append(AddressRange(first, end - first))
    return tuple(pages)


def overlaps(first: AddressRange, second: AddressRange) -> bool:
    return first.address < second.end and second.address < first.end


def plain_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | NoAddress:
    """The plain tensors that hold a tensor's bytes: itself, or the components of a quantised or nested tensor."""
    import torch

    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return _check_plain(tensor)
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(tensor, FakeTensor):
        return NoAddress("a fake tensor has no memory")
    value: object = tensor
    if not isinstance(value, torch.Tensor):  # a caller that passes a batch or a name sees this reason in the outcome
        return NoAddress(f"{type(value).__name__} is not a tensor; use the batch functions for a batch")
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return _check_plain(tensor)
    names, _ = flatten()
    parts: list[torch.Tensor] = []
    for name in names:
        inner = plain_parts(getattr(tensor, name))
        if isinstance(inner, NoAddress):
            return inner
        parts += inner
    return tuple(parts) if parts else NoAddress("a tensor without components")


def strided_layout(tensor: torch.Tensor) -> StridedLayout:
    """The layout of a plain tensor, as `plain_parts` returns them."""
    return StridedLayout(tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tuple(tensor.stride()))


def _check_plain(tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | NoAddress:
    import torch

    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        return NoAddress(f"a tensor of layout {layout} is not a single block of memory")
    if tensor.device.type == "meta":
        return NoAddress("a tensor on the meta device has no memory")
    if tensor.device.type not in ("cpu", "cuda"):
        return NoAddress(f"hints are not supported for memory of {tensor.device.type}")
    try:
        tensor.data_ptr()
    except (RuntimeError, ValueError):
        # torch raises this for a wrapper (vmap, functionalize) and for a parameter without a shape.
        return NoAddress("this tensor has no memory")
    return (tensor,)


def _contiguous_run(layout: StridedLayout) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of the longest contiguous run of the innermost dimensions, and (size, stride in bytes) of the outer
    dimensions.
    """
    dimensions = zip(layout.shape, layout.strides, strict=True)
    run_bytes = layout.itemsize
    outer: list[tuple[int, int]] = []
    for stride, n in sorted((stride * layout.itemsize, n) for n, stride in dimensions if n > 1):
        if not outer and stride <= run_bytes:  # the next element begins where this run ends, or inside it
            run_bytes += stride * (n - 1)
        else:
            outer.append((n, stride))
    return run_bytes, outer


def _merge_adjacent(spans: Iterable[AddressRange]) -> Pieces:
    """Merge adjacent and overlapping ranges, given in order of address."""
    merged: list[AddressRange] = []
    for span in spans:
        if merged and span.address <= merged[-1].end:
            merged[-1] = AddressRange(merged[-1].address, max(merged[-1].end, span.end) - merged[-1].address)
        else:
            merged.append(span)
    return tuple(merged)
