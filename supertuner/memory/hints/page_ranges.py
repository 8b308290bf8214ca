"""From a tensor to the whole pages that belong to it alone: what a hint may touch without touching a neighbour.

A view covers its own bytes, not its storage. Ranges are rounded inward to pages, so a page that holds a single byte of
something else is left out. Pure functions over (address, itemsize, shape, strides), and one that reads them off a
tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from supertuner.memory.driver import AddressRange

if TYPE_CHECKING:
    import torch

MAX_PIECES: Final = 1024
"""Contiguous pieces of one view beyond which it is not hinted: each would be a call to the driver."""


@dataclass(frozen=True, slots=True)
class StridedLayout:
    """Where the elements of a strided tensor lie. Strides count elements, and are not negative."""

    address: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> AddressRange:
        """From the first byte to the last. There may be bytes of others in between."""
        if 0 in self.shape:
            return AddressRange(self.address, 0)
        reach = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return AddressRange(self.address, (reach + 1) * self.itemsize)


@dataclass(frozen=True, slots=True)
class TooManyPieces:
    """A view in more pieces than are worth hinting."""

    pieces: int


@dataclass(frozen=True, slots=True)
class NoAddress:
    """A tensor without memory of its own that could be hinted, and why."""

    reason: str


def whole_pages(
    layout: StridedLayout, page_bytes: int, max_pieces: int = MAX_PIECES
) -> tuple[AddressRange, ...] | TooManyPieces:
    """The pages that hold nothing but bytes of this view, as ranges in order of address."""
    ranges = contiguous_pieces(layout, max_pieces)
    if not isinstance(ranges, TooManyPieces):
        return whole_pages_inside(ranges, page_bytes)
    # Pieces that cannot fill a page even where two of them meet: whole pages or not, the answer is none.
    return () if 2 * _contiguous_run(layout)[0] < page_bytes else ranges


def contiguous_pieces(layout: StridedLayout, max_pieces: int = MAX_PIECES) -> tuple[AddressRange, ...] | TooManyPieces:
    """The bytes of a view as contiguous ranges in order of address, as few as there can be."""
    if 0 in layout.shape:
        return ()
    run_bytes, outer = _contiguous_run(layout)
    count = 1
    for n, _ in outer:
        count *= n
    if count > max_pieces:
        return TooManyPieces(count)
    steps = itertools.product(*(range(0, n * stride, stride) for n, stride in outer))
    starts = sorted(layout.address + sum(step) for step in steps)
    return _merge_adjacent(AddressRange(start, run_bytes) for start in starts)


def whole_pages_inside(spans: Iterable[AddressRange], page_bytes: int) -> tuple[AddressRange, ...]:
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
    """The plain tensors that hold a tensor's bytes: itself, or what a quantised or nested tensor is made of."""
    import torch

    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return _check_plain(tensor)
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(tensor, FakeTensor):
        return NoAddress("a fake tensor has no memory")
    value: object = tensor
    if not isinstance(value, torch.Tensor):  # whoever passes a batch, or a tensor's name, reads it in the outcome
        return NoAddress(f"{type(value).__name__} is no tensor; batches have functions of their own")
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
    return tuple(parts) if parts else NoAddress("a tensor without parts")


def strided_layout(tensor: torch.Tensor) -> StridedLayout:
    """Of a plain tensor, as `parts_of` gives them."""
    return StridedLayout(tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tuple(tensor.stride()))


def _check_plain(tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | NoAddress:
    import torch

    if tensor.layout != torch.strided:
        return NoAddress(f"a tensor of layout {str(tensor.layout).removeprefix('torch.')} is not one piece of memory")
    if tensor.device.type == "meta":
        return NoAddress("a tensor on the meta device has no memory")
    if tensor.device.type not in ("cpu", "cuda"):
        return NoAddress(f"no hints for memory of {tensor.device.type}")
    try:
        tensor.data_ptr()
    except (RuntimeError, ValueError):
        # torch's answer for a wrapper (vmap, functionalize) and for a parameter that has no shape yet.
        return NoAddress("this tensor has no memory of its own")
    return (tensor,)


def _contiguous_run(layout: StridedLayout) -> tuple[int, list[tuple[int, int]]]:
    """The longest contiguous run from the innermost dimensions on, and (size, stride in bytes) of those around it."""
    dimensions: Sequence[tuple[int, int]] = sorted(
        ((stride * layout.itemsize, n) for n, stride in zip(layout.shape, layout.strides, strict=True) if n > 1),
    )
    run_bytes = layout.itemsize
    outer: list[tuple[int, int]] = []
    for stride, n in dimensions:
        if not outer and stride <= run_bytes:  # the next run begins where this one ends, or inside it
            run_bytes += stride * (n - 1)
        else:
            outer.append((n, stride))
    return run_bytes, outer


def _merge_adjacent(spans: Iterable[AddressRange]) -> tuple[AddressRange, ...]:
    """Ranges in order of address, with those that touch made one."""
    merged: list[AddressRange] = []
    for span in spans:
        if merged and span.address <= merged[-1].end:
            merged[-1] = AddressRange(merged[-1].address, max(merged[-1].end, span.end) - merged[-1].address)
        else:
            merged.append(span)
    return tuple(merged)
