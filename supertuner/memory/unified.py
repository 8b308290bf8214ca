"""Batches in unified memory: one managed block per batch, written by the CPU, on its way to the GPU before it is used.

A block goes back to the free list when no tensor over it lives *and* the GPU is done with what was queued by then. All
blocks together stay below a limit. What cannot be placed is answered with the reason, and the caller does what it would
do without: pinned memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import torch

from supertuner.core.types import GIB, MIB
from supertuner.memory.dlpack import Header, Wrapped
from supertuner.memory.driver import Driver, Gpu, Kind, Refused, Span
from supertuner.memory.hints.outcomes import Outcome, Status
from supertuner.memory.hints.page_ranges import inward
from supertuner.memory.hints.request import Ask, Desk, Verb

BLOCK_BYTES: Final = 2 * MIB
"""What the driver works in: blocks are multiples of it."""
ALIGNMENT: Final = 512
"""Where a tensor of a batch begins, as torch's own allocator has it."""

Fence: TypeAlias = Callable[[], Callable[[], bool]]
"""Marks this moment in the GPU's work; the answer tells whether the GPU has passed it."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Managed memory that is lent to one batch after the other."""

    span: Span
    header: Header


@dataclass(slots=True, eq=False)
class _Lent:
    """A block in use."""

    block: Block
    wrapped: Wrapped
    passed: Callable[[], bool] | None = None
    """Once no tensor lives: whether the GPU is done too."""


class Blocks:
    """Blocks of managed memory by size class, never more than a limit together."""

    def __init__(self, driver: Driver, gpu: int, device: torch.device, limit_bytes: int) -> None:
        self._driver, self._gpu, self._device, self._limit = driver, gpu, device, limit_bytes
        self._idle: dict[int, list[Block]] = {}
        self._headers: list[Header] = []
        """Of blocks that went back to the driver. Kept: a thread on which the last tensor of a block ends looks at its
        header a moment after the storage is expired."""
        self.held_bytes = 0
        """Of all blocks, lent and idle."""

    @property
    def idle_bytes(self) -> int:
        return sum(size * len(blocks) for size, blocks in self._idle.items())

    def take(self, nbytes: int) -> Block | Outcome:
        """A block of at least `nbytes`, or why there is none."""
        size = size_class(nbytes)
        if self._idle.get(size):
            return self._idle[size].pop()
        if size > self._limit - self.held_bytes + self.idle_bytes:
            return Outcome(Status.REFUSED, "batches in unified memory reached their limit")
        try:
            while self.held_bytes + size > self._limit:
                self._release(next(blocks for blocks in self._idle.values() if blocks).pop())
            address = self._driver.allocate(Kind.MANAGED, size, self._gpu)
        except Refused as refused:
            return Outcome(Status.UNSUPPORTED if refused.unsupported else Status.REFUSED, str(refused))
        self.held_bytes += size
        header = self._headers.pop() if self._headers else Header(self._device)
        header.aim(address, size)
        return Block(Span(address, size), header)

    def give(self, block: Block) -> None:
        self._idle.setdefault(block.span.nbytes, []).append(block)

    def release(self) -> None:
        """Give every idle block back to the driver."""
        for blocks in self._idle.values():
            while blocks:
                self._release(blocks.pop())

    def _release(self, block: Block) -> None:
        self._driver.free(block.span.address)
        self._headers.append(block.header)
        self.held_bytes -= block.span.nbytes


class UnifiedBuffers:
    """Puts batches into managed memory. May be used from several threads."""

    def __init__(
        self,
        driver: Driver,
        device: torch.device,
        *,
        limit_bytes: int = 2 * GIB,
        headroom_bytes: int | None = None,
        free_bytes: Callable[[], int | None] | None = None,
        fence: Fence | None = None,
    ) -> None:
        """`device` is where the tensors will be. `fence`: by default, events on the stream that is current here and on
        the one that is current where a batch is placed; work on other streams must be joined before a batch ends."""
        gpu = device.index or 0
        described = next(one for one in driver.devices() if one.number == gpu)
        headroom = described.total_bytes // 20 if headroom_bytes is None else headroom_bytes
        self._desk = Desk(driver, described, headroom, free_bytes or partial(driver.free_bytes, gpu))
        self._ask = Ask(Verb.PREFETCH, Gpu(gpu))
        self._blocks = Blocks(driver, gpu, device, limit_bytes)
        self._lent: list[_Lent] = []
        self._fence = fence or _events(device)
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Managed memory of all blocks."""
        return self._blocks.held_bytes

    @property
    def lent(self) -> int:
        """Blocks that a batch, or the GPU, may still use."""
        return len(self._lent)

    def place(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor] | None, Outcome]:
        """The tensors of a batch as tensors of the device, in one block, and what became of sending it there.

        They hold the same values, contiguously. None: not placed, and the outcome says why.
        """
        if self._desk.device.managed is False or self._desk.device.concurrent_managed is False:
            return None, Outcome(Status.UNSUPPORTED, "no managed memory that CPU and GPU may use at once")
        if not all(_is_plain(tensor) for tensor in tensors):
            return None, Outcome(Status.UNSUPPORTED, "a batch with a tensor that is not plain memory of the host")
        offsets, nbytes = _packed(tensors)
        with self._lock:
            self._settle()
            block = self._blocks.take(nbytes)
            if isinstance(block, Outcome):
                return None, block
            try:
                _write(block.span, offsets, tensors)
                whole, wrapped = block.header.wrap()
            except BaseException:
                self._blocks.give(block)
                raise
            self._lent.append(_Lent(block, wrapped))
        placed = [_view(whole, offset, tensor) for offset, tensor in zip(offsets, tensors, strict=True)]
        return placed, self._send(Span(block.span.address, nbytes))

    def settle(self) -> None:
        """Take back the blocks that nobody uses any more. `place` does it too."""
        with self._lock:
            self._settle()

    def close(self) -> None:
        """Give back what is idle. A block that is still lent stays: its tensors would point nowhere."""
        with self._lock:
            self._settle()
            self._blocks.release()

    def _send(self, used: Span) -> Outcome:
        page = self._desk.driver.page_bytes
        pages = inward((Span(used.address, -(-used.nbytes // page) * page),), page)
        if not pages:
            return Outcome(Status.NO_EFFECT, "an empty batch", used)
        outcome = self._desk.ask(pages, self._ask, wait=False)
        return Outcome(outcome.status, outcome.reason, used, outcome.touched)

    def _settle(self) -> None:
        for lent in tuple(self._lent):
            if lent.passed is None and not lent.wrapped.alive:
                lent.passed = self._fence()  # all that used it was queued before it ended, so before this moment
            if lent.passed is not None and lent.passed():
                self._lent.remove(lent)  # at once: a later one may end in an error, and this one is lent no more
                self._blocks.give(lent.block)


def size_class(nbytes: int) -> int:
    """The size of the block for so many bytes: whole blocks of the driver, and at most an eighth too much above 16."""
    blocks = max(1, -(-nbytes // BLOCK_BYTES))
    step = 1 << max(0, blocks.bit_length() - 4)
    return -(-blocks // step) * step * BLOCK_BYTES


def _packed(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins in a block, and the bytes of all."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _write(span: Span, offsets: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
    """Copy by the CPU, which may write managed memory wherever it is."""
    header = Header(torch.device("cpu"))
    header.aim(span.address, span.nbytes)
    whole, wrapped = header.wrap()
    for offset, tensor in zip(offsets, tensors, strict=True):
        _view(whole, offset, tensor).copy_(tensor.detach())
    del whole
    assert not wrapped.alive
    header.free()


def _view(whole: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return whole[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


def _is_plain(tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided
    return plain and not tensor.is_quantized and not tensor.is_nested


def _events(device: torch.device) -> Fence:
    if device.type != "cuda":
        return lambda: lambda: True
    maker = torch.cuda.current_stream(device)

    def fence() -> Callable[[], bool]:
        streams = {maker, torch.cuda.current_stream(device)}
        events = [stream.record_event() for stream in streams]
        return lambda: all(event.query() for event in events)

    return fence
