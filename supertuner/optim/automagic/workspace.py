"""Reusable buffers for intermediate results: allocating memory and creating views costs more than the arithmetic.

There is one `DeviceWorkspace` per device, and one `ScratchViews` per batch size in it. All views of a workspace share
the same memory, so only the views that were requested last may be used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

PlanePairs = list[tuple[torch.Tensor, torch.Tensor]]


def padded_count(count: int) -> int:
    """`count` rounded up to a multiple of 8, so that packed signs fill whole bytes."""
    return -(-count // 8) * 8


@dataclass(frozen=True, eq=False, slots=True)
class BitMasks:
    """Bit masks as tensors on a device, built once because building them waits for the device.

    The packed layout is described in packed_rates.py.
    """

    one: torch.Tensor
    sign_bits: torch.Tensor
    """1, 2, 4 … 128: the bit of each of the 8 sign planes in a byte."""
    bit_pairs: torch.Tensor
    """3, 12, 48, 192: the two bits of each of the 4 planes of `high` in a byte."""
    to_high_bits: torch.Tensor
    """256, 64, 16, 4: the factor that moves a plane's two bits to bits 8 and 9 of an int16."""
    to_pair_position: torch.Tensor
    """1, 4, 16, 64: the factor that moves bits 0 and 1 to a plane's place in a byte."""
    byte_shift: torch.Tensor
    """8: the shift from bits 8 and 9 to bits 0 and 1."""


class ScratchViews:
    """Views of a workspace's memory for a batch of `batch_size` matrices of `rows` × `columns`.

    Several names view the same memory: a comment says where one value replaces another.
    """

    def __init__(self, workspace: DeviceWorkspace, batch_size: int, rows: int, columns: int) -> None:
        count, padded_size = rows * columns, padded_count(rows * columns)
        matrices, flat = (batch_size, rows, columns), (batch_size, padded_size)
        self.bits = workspace.bits
        self.updates = workspace.buffer("updates", matrices, torch.float32)
        self.gradient = workspace.buffer("gradient", matrices, torch.float32)
        # The signs of the gradient in fp32, and later the new rates.
        self.exact_signs = workspace.buffer("rates", matrices, torch.float32)
        self.rates = workspace.buffer("rates", flat, torch.float32)
        # The signs of the update as int8, and later the moves (1, 0, -1). The planes view the same bytes: plane k holds
        # elements k·n/8 … (k+1)·n/8 - 1.
        self.moves = workspace.buffer("moves", flat, torch.int8)
        self.signs_in, self.padding = self.moves[:, :count].view(matrices), self.moves[:, count:]
        self.planes = self.moves.view(torch.uint8).view(batch_size, 8, padded_size // 8)
        self.planes_signed = self.moves.view(batch_size, 8, padded_size // 8)
        self.nonzero = workspace.buffer("some", (batch_size, 8, padded_size // 8), torch.uint8)
        self.octets = workspace.buffer("octets", (batch_size, 8, padded_size // 8), torch.uint8)
        self.octets_signed = self.octets.view(torch.int8)
        # Folding ORs all planes into plane 0, which then holds 8 elements per byte (octet), or 4 (quad).
        self.octet, self.octet_folds = self.octets[:, 0], _fold_pairs(self.octets)
        self.quads = workspace.buffer("octets", (batch_size, 4, padded_size // 4), torch.uint8)
        self.quad, self.quad_folds = self.quads[:, 0], _fold_pairs(self.quads)
        self.codes = workspace.buffer("codes", flat, torch.int16)
        self.doubled = workspace.buffer("doubled", flat, torch.int16)
        self.high_bits = workspace.buffer("parts", flat, torch.int16)
        self.high_bits_in_quads = self.high_bits.view(self.quads.shape)


class DeviceWorkspace:
    """The buffers of one device."""

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
        """A view of the named buffer. If the buffer must grow, a new one replaces it; older views keep their memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self._buffers.get(name)
        if memory is None or memory.numel() < nbytes:
            memory = self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return memory[:nbytes].view(dtype).view(shape)

    def clear(self) -> None:
        """Release all memory."""
        self._buffers.clear()
        self._scratch.clear()


def fold_planes(planes: PlanePairs) -> None:
    """OR all planes into plane 0, by halves: log₂(planes) operations."""
    for upper, lower in planes:
        upper.bitwise_or_(lower)


def _fold_pairs(planes: torch.Tensor) -> PlanePairs:
    pairs = []
    half = planes.shape[1] // 2
    while half:
        pairs.append((planes[:, :half], planes[:, half : 2 * half]))
        half //= 2
    return pairs
