"""From a tensor to the whole pages that belong to it alone: what a hint may touch without touching a neighbour.

A view covers its own bytes, not its storage. Ranges are rounded inward to pages, so a page that holds a single byte of
something else is left out. Pure functions over (address, itemsize, shape, strides), and one that reads them off a
tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from supertuner.memory.driver import Span

MOST_PIECES: Final = 1024
"""Contiguous pieces of one view beyond which it is not hinted: each would be a call to the driver."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the elements of a strided tensor lie. Strides count elements, and are not negative."""

    address: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> Span:
        """From the first byte to the last. There may be bytes of others in between."""
        if 0 in self.shape:
            return Span(self.address, 0)
        reach = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return Span(self.address, (reach + 1) * self.itemsize)


@dataclass(frozen=True, slots=True)
class TooMany:
    """A view in more pieces than are worth hinting."""

    pieces: int


@dataclass(frozen=True, slots=True)
class NoAddress:
    """A tensor without memory of its own that could be hinted, and why."""

    reason: str


def whole_pages(layout: Layout, page_bytes: int, most: int = MOST_PIECES) -> tuple[Span, ...] | TooMany:
    """The pages that hold nothing but bytes of this view, as ranges in order of address."""
    found = pieces(layout, most)
    if not isinstance(found, TooMany):
        return inward(found, page_bytes)
    # Pieces that cannot fill a page even where two of them meet: whole pages or not, the answer is none.
    return () if 2 * _block(layout)[0] < page_bytes else found


def pieces(layout: Layout, most: int = MOST_PIECES) -> tuple[Span, ...] | TooMany:
    """The bytes of a view as contiguous ranges in order of address, as few as there can be."""
    if 0 in layout.shape:
        return ()
    block, outer = _block(layout)
    count = 1
    for n, _ in outer:
        count *= n
    if count > most:
        return TooMany(count)
    steps = itertools.product(*(range(0, n * stride, stride) for n, stride in outer))
    starts = sorted(layout.address + sum(step) for step in steps)
    return _joined(Span(start, block) for start in starts)


def inward(spans: Iterable[Span], page_bytes: int) -> tuple[Span, ...]:
    """The whole pages inside each range."""
    found = []
    for span in spans:
        first, end = -(-span.address // page_bytes) * page_bytes, span.end // page_bytes * page_bytes
        if end > first:
            found.append(Span(first, end - first))
    return tuple(found)


def overlap(one: Span, other: Span) -> bool:
    return one.address < other.end and other.address < one.end


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | NoAddress:
    """The plain tensors that hold a tensor's bytes: itself, or what a quantised or nested tensor is made of."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return _plain(tensor)
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(tensor, FakeTensor):
        return NoAddress("a fake tensor has no memory")
    given: object = tensor
    if not isinstance(given, torch.Tensor):  # whoever passes a batch, or a tensor's name, reads it in the outcome
        return NoAddress(f"{type(given).__name__} is no tensor; batches have functions of their own")
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return _plain(tensor)
    names, _ = flatten()
    found: list[torch.Tensor] = []
    for name in names:
        inner = parts_of(getattr(tensor, name))
        if isinstance(inner, NoAddress):
            return inner
        found += inner
    return tuple(found) if found else NoAddress("a tensor without parts")


def layout_of(tensor: torch.Tensor) -> Layout:
    """Of a plain tensor, as `parts_of` gives them."""
    return Layout(tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tuple(tensor.stride()))


def _plain(tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | NoAddress:
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


def _block(layout: Layout) -> tuple[int, list[tuple[int, int]]]:
    """The longest contiguous run from the innermost dimensions on, and (size, stride in bytes) of those around it."""
    dimensions: Sequence[tuple[int, int]] = sorted(
        ((stride * layout.itemsize, n) for n, stride in zip(layout.shape, layout.strides, strict=True) if n > 1),
    )
    block = layout.itemsize
    outer: list[tuple[int, int]] = []
    for stride, n in dimensions:
        if not outer and stride <= block:  # the next run begins where this one ends, or inside it
            block += stride * (n - 1)
        else:
            outer.append((n, stride))
    return block, outer


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Ranges in order of address, with those that touch made one."""
    found: list[Span] = []
    for span in spans:
        if found and span.address <= found[-1].end:
            found[-1] = Span(found[-1].address, max(found[-1].end, span.end) - found[-1].address)
        else:
            found.append(span)
    return tuple(found)
