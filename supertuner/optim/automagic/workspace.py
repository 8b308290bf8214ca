"""Room for intermediate results, used again and again: fresh memory and views cost more than the arithmetic on them.

A bench belongs to a device, and a set of tools to one size of batch on it. All tools of a bench lie in the same memory,
so only those that were taken last may be used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

PlanePairs = list[tuple[torch.Tensor, torch.Tensor]]


def padded_count(count: int) -> int:
    """Elements that rates and signs are kept for: whole bytes."""
    return -(-count // 8) * 8


@dataclass(frozen=True, eq=False, slots=True)
class BitMasks:
    """Where bits lie, as tensors on a device; made once, since making them waits for the device."""

    one: torch.Tensor
    sign_bits: torch.Tensor
    """The bit of each of 8 planes of a byte."""
    bit_pairs: torch.Tensor
    """The two bits of each of its 4 planes."""
    to_high_bits: torch.Tensor
    """What brings those two bits to bits 8 and 9."""
    to_pair_position: torch.Tensor
    """What brings bits 0 and 1 to them."""
    byte_shift: torch.Tensor
    """By how much to shift for the next byte."""


class ScratchViews:
    """Views of a bench's memory for batches of `many` tensors of `rows` by `columns`."""

    def __init__(self, workspace: DeviceWorkspace, batch_size: int, rows: int, columns: int) -> None:
        count, padded_size = rows * columns, padded_count(rows * columns)
        matrices, flat = (batch_size, rows, columns), (batch_size, padded_size)
        self.bits = workspace.bits
        self.updates = workspace.buffer("updates", matrices, torch.float32)
        self.gradient = workspace.buffer("gradient", matrices, torch.float32)
        self.exact_signs = workspace.buffer("rates", matrices, torch.float32)
        self.rates = workspace.buffer("rates", flat, torch.float32)
        self.moves = workspace.buffer("moves", flat, torch.int8)
        self.signs_in, self.padding = self.moves[:, :count].view(matrices), self.moves[:, count:]
        self.planes = self.moves.view(torch.uint8).view(batch_size, 8, padded_size // 8)
        self.planes_signed = self.moves.view(batch_size, 8, padded_size // 8)
        self.nonzero = workspace.buffer("some", (batch_size, 8, padded_size // 8), torch.uint8)
        self.octets = workspace.buffer("octets", (batch_size, 8, padded_size // 8), torch.uint8)
        self.octets_signed = self.octets.view(torch.int8)
        self.octet, self.octet_folds = self.octets[:, 0], _fold_pairs(self.octets)
        self.quads = workspace.buffer("octets", (batch_size, 4, padded_size // 4), torch.uint8)
        self.quad, self.quad_folds = self.quads[:, 0], _fold_pairs(self.quads)
        self.codes = workspace.buffer("codes", flat, torch.int16)
        self.high_bits = workspace.buffer("parts", flat, torch.int16)
        self.high_bits_in_quads = self.high_bits.view(self.quads.shape)


class DeviceWorkspace:
    """One device's intermediate results."""

    def __init__(self, device: torch.device) -> None:
        def constant(dtype: torch.dtype, *numbers: int) -> torch.Tensor:
            return torch.tensor(numbers, dtype=dtype, device=device).view(1, -1, 1)

        self.device = device
        self.bits = BitMasks(
            one=torch.tensor(1, dtype=torch.uint8, device=device),
            sign_bits=constant(torch.uint8, 1, 2, 4, 8, 16, 32, 64, 128),
            bit_pairs=constant(torch.uint8, 3, 12, 48, 192),
            to_high_bits=constant(torch.int16, 256, 64, 16, 4),
            to_pair_position=constant(torch.uint8, 1, 4, 16, 64),
            byte_shift=torch.tensor(8, dtype=torch.int16, device=device),
        )
        self._buffers: dict[str, torch.Tensor] = {}
        self._scratch: dict[tuple[int, int, int], ScratchViews] = {}

    def scratch(self, batch_size: int, rows: int, columns: int) -> ScratchViews:
        key = batch_size, rows, columns
        if key not in self._scratch:
            self._scratch[key] = ScratchViews(self, *key)
        return self._scratch[key]

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The memory of that name. Where it must grow, older views of it keep what they had."""
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self._buffers.get(name)
        if memory is None or memory.numel() < nbytes:
            memory = self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return memory[:nbytes].view(dtype).view(shape)

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers.clear()
        self._scratch.clear()


def fold_planes(planes: PlanePairs) -> None:
    """The bits of all planes into the first."""
    for upper, lower in planes:
        upper.bitwise_or_(lower)


def _fold_pairs(planes: torch.Tensor) -> PlanePairs:
    pairs = []
    half = planes.shape[1] // 2
    while half:
        pairs.append((planes[:, :half], planes[:, half : 2 * half]))
        half //= 2
    return pairs
