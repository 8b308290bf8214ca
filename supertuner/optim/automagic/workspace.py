"""Room for intermediate results, used again and again: fresh memory and views cost more than the arithmetic on them.

A bench belongs to a device, and a set of tools to one size of batch on it. All tools of a bench lie in the same memory,
so only those that were taken last may be used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Planes = list[tuple[torch.Tensor, torch.Tensor]]


def padded(count: int) -> int:
    """Elements that rates and signs are kept for: whole bytes."""
    return -(-count // 8) * 8


@dataclass(frozen=True, eq=False, slots=True)
class Bits:
    """Where bits lie, as tensors on a device; made once, since making them waits for the device."""

    one: torch.Tensor
    eight: torch.Tensor
    """The bit of each of 8 planes of a byte."""
    pairs: torch.Tensor
    """The two bits of each of its 4 planes."""
    down: torch.Tensor
    """What brings those two bits to bits 8 and 9."""
    up: torch.Tensor
    """What brings bits 0 and 1 to them."""
    byte: torch.Tensor
    """By how much to shift for the next byte."""


class Tools:
    """Views of a bench's memory for batches of `many` tensors of `rows` by `columns`."""

    def __init__(self, bench: Bench, many: int, rows: int, columns: int) -> None:
        count, whole = rows * columns, padded(rows * columns)
        matrices, flat = (many, rows, columns), (many, whole)
        self.bits = bench.bits
        self.updates = bench.room("updates", matrices, torch.float32)
        self.gradient = bench.room("gradient", matrices, torch.float32)
        self.exact_signs = bench.room("rates", matrices, torch.float32)
        self.rates = bench.room("rates", flat, torch.float32)
        self.moves = bench.room("moves", flat, torch.int8)
        self.signs_in, self.beyond = self.moves[:, :count].view(matrices), self.moves[:, count:]
        self.planes = self.moves.view(torch.uint8).view(many, 8, whole // 8)
        self.planes_signed = self.moves.view(many, 8, whole // 8)
        self.some = bench.room("some", (many, 8, whole // 8), torch.uint8)
        self.octets = bench.room("octets", (many, 8, whole // 8), torch.uint8)
        self.octets_signed = self.octets.view(torch.int8)
        self.octet, self.octet_folds = self.octets[:, 0], _folds(self.octets)
        self.quads = bench.room("octets", (many, 4, whole // 4), torch.uint8)
        self.quad, self.quad_folds = self.quads[:, 0], _folds(self.quads)
        self.codes = bench.room("codes", flat, torch.int16)
        self.parts = bench.room("parts", flat, torch.int16)
        self.parts_in_quads = self.parts.view(self.quads.shape)


class Bench:
    """One device's intermediate results."""

    def __init__(self, device: torch.device) -> None:
        def constant(dtype: torch.dtype, *numbers: int) -> torch.Tensor:
            return torch.tensor(numbers, dtype=dtype, device=device).view(1, -1, 1)

        self.device = device
        self.bits = Bits(
            one=torch.tensor(1, dtype=torch.uint8, device=device),
            eight=constant(torch.uint8, 1, 2, 4, 8, 16, 32, 64, 128),
            pairs=constant(torch.uint8, 3, 12, 48, 192),
            down=constant(torch.int16, 256, 64, 16, 4),
            up=constant(torch.uint8, 1, 4, 16, 64),
            byte=torch.tensor(8, dtype=torch.int16, device=device),
        )
        self._places: dict[str, torch.Tensor] = {}
        self._tools: dict[tuple[int, int, int], Tools] = {}

    def tools(self, many: int, rows: int, columns: int) -> Tools:
        key = many, rows, columns
        if key not in self._tools:
            self._tools[key] = Tools(self, *key)
        return self._tools[key]

    def room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The memory of that name. Where it must grow, older views of it keep what they had."""
        nbytes = math.prod(shape) * dtype.itemsize
        place = self._places.get(name)
        if place is None or place.numel() < nbytes:
            place = self._places[name] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return place[:nbytes].view(dtype).view(shape)

    def clear(self) -> None:
        """Give the memory back."""
        self._places.clear()
        self._tools.clear()


def fold(planes: Planes) -> None:
    """The bits of all planes into the first."""
    for upper, lower in planes:
        upper.bitwise_or_(lower)


def _folds(planes: torch.Tensor) -> Planes:
    found = []
    half = planes.shape[1] // 2
    while half:
        found.append((planes[:, :half], planes[:, half : 2 * half]))
        half //= 2
    return found
