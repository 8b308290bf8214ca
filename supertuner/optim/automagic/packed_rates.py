"""One learning rate per weight in 10 bits, and the sign of its last update in 1 bit.

A rate that moves by ±`bump` between two limits takes few values. They are numbered: rate_grid.py says which code stands
for which rate, and how a code moves.

For n elements (rounded up to a multiple of 8) the state holds 1.375 bytes per element:

    low     uint8 [n]      bits 0–7 of the code
    high    uint8 [n / 4]  bits 8–9 of the code: byte j holds elements j, j + n/4, j + 2n/4, j + 3n/4, lowest bits first
    signs   uint8 [n / 8]  1 if the last update was negative: byte j holds elements j, j + n/8, … j + 7n/8, lowest first

The elements that share a byte are n/4 (or n/8) apart instead of adjacent: then the packed bytes are n/4 contiguous
numbers that combine 4 contiguous quarters ("planes") of the tensor, and packing and unpacking are a few elementwise
operations on whole planes, without a gather or a bit shift per element. _automagic.c uses the same layout.

Tensors of equal size are processed together as rows of one tensor; all functions below take and return rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from supertuner.optim.automagic.rate_grid import (
    ALL_DOUBLED,
    MAX_CODE,
    NO_SPLIT,
    LearningRateLimits,
    RateGrid,
    converted_codes,
    make_grid,
)
from supertuner.optim.automagic.workspace import ScratchViews, fold_planes

StoredRates: TypeAlias = Mapping[str, torch.Tensor]
NoiseSource: TypeAlias = Callable[[], torch.Tensor]
"""Returns uniform int16 numbers, one per element."""
QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True, slots=True)
class LearningRateSpread:
    """The distribution of the learning rates of many weights."""

    mean: float
    lowest: float
    quantiles: tuple[float, ...]
    """The rates at `QUANTILES`."""
    highest: float

    def figures(self) -> dict[str, float]:
        """All numbers by name; `q10` is the rate that a tenth of the weights are below."""
        quantiles = {f"q{share:.0%}".rstrip("%"): rate for share, rate in zip(QUANTILES, self.quantiles, strict=True)}
        return {"mean": self.mean, "lowest": self.lowest, **quantiles, "highest": self.highest}


class PackedRates:
    """Rates as codes of 10 bits per element."""

    def __init__(self, limits: LearningRateLimits) -> None:
        self.grid = make_grid(limits)
        self.max_code = self.grid.max_code
        self._start_code = self.grid.nearest_code(limits.start)

    def entries(self, count: int) -> dict[str, tuple[int, torch.dtype]]:
        """The state of `count` elements (a multiple of 8): name → length and type."""
        return {"low": (count, torch.uint8), "high": (count // 4, torch.uint8)}

    def initialize(self, stored: StoredRates) -> None:
        """Set all rates to the initial rate."""
        stored["low"].fill_(self._start_code % 256)
        stored["high"].fill_(self._start_code // 256 * 0b01010101)  # the same two bits four times

    def advance(
        self, stored: StoredRates, moves: torch.Tensor, step: int, noise: NoiseSource, scratch: ScratchViews
    ) -> torch.Tensor:
        """Move each rate by `moves` bumps (int8: 1, 0 or -1) and return the new rates in units."""
        codes = unpack_codes(stored, scratch)
        if self.grid.move_probability < 1.0:
            moves = moves * (noise() < self._noise_threshold(step))
        self._move_codes(codes, scratch.high_bits.copy_(moves), scratch.doubled)
        pack_codes(codes, stored, scratch)
        return self._rates_in_units(codes, scratch)

    def read(self, stored: StoredRates, scratch: ScratchViews) -> torch.Tensor:
        """The current rates in fp32."""
        return self._rates_in_units(unpack_codes(stored, scratch), scratch).mul(self.grid.unit)

    def convert(self, stored: StoredRates, scratch: ScratchViews, saved: RateGrid) -> None:
        """Re-encode rates that were stored with another grid, each to the nearest rate."""
        table = torch.tensor(converted_codes(saved, self.grid), dtype=torch.int16, device=stored["low"].device)
        pack_codes(table[unpack_codes(stored, scratch).to(torch.int32)], stored, scratch)

    def _move_codes(self, codes: torch.Tensor, moves: torch.Tensor, doubled: torch.Tensor) -> None:
        """`RateGrid.move` of all codes, in place. `moves` (int16) is overwritten, `doubled` is scratch."""
        grid = self.grid
        units = grid.step * (2 if grid.split == ALL_DOUBLED else 1)
        codes.add_(moves if units == 1 else moves.mul_(units))
        if grid.split not in (NO_SPLIT, ALL_DOUBLED):
            codes.add_(moves.mul_(torch.lt(codes, grid.split, out=doubled)))
        codes.clamp_(0, self.max_code)

    def _rates_in_units(self, codes: torch.Tensor, scratch: ScratchViews) -> torch.Tensor:
        """`RateGrid.rate` of all codes in units. The codes are overwritten."""
        grid = self.grid
        if grid.split != NO_SPLIT:
            doubled = torch.clamp(codes, max=grid.split, out=scratch.doubled)
            odd = torch.bitwise_and(doubled, 1, out=scratch.high_bits)
            codes.sub_(doubled.add_(odd).bitwise_right_shift_(1))
        rates = scratch.rates.copy_(codes)
        if grid.split != NO_SPLIT:
            rates.add_(odd, alpha=grid.offset)
        return rates.add_(grid.lowest / grid.unit).clamp_(max=grid.highest / grid.unit)

    def histogram(self, stored: StoredRates, count: int, scratch: ScratchViews) -> torch.Tensor:
        """The number of elements with each code, among the first `count` elements."""
        codes = unpack_codes(stored, scratch)[:, :count].to(torch.float32)
        return torch.histc(codes, MAX_CODE + 1, min=-0.5, max=MAX_CODE + 0.5).double()

    def spread_of_histogram(self, counts: torch.Tensor, factor: float) -> LearningRateSpread | None:
        """The distribution of rates for these counts of codes; None without any. Waits for the device."""
        rates = torch.tensor([self.grid.rate(code) for code in range(MAX_CODE + 1)], dtype=torch.float64).mul_(factor)
        numbers = counts.cpu()
        total = float(numbers.sum())
        if not total:
            return None
        cumulative = numbers.cumsum(0)
        ends = torch.tensor([0.0, *QUANTILES, 1.0], dtype=torch.float64).mul_(total).clamp_(min=0.5)
        lowest, *quantiles, highest = rates[torch.searchsorted(cumulative, ends).clamp_(max=MAX_CODE)].tolist()
        return LearningRateSpread(float(numbers @ rates) / total, lowest, tuple(quantiles), highest)

    def _noise_threshold(self, step: int) -> int:
        """Codes whose noise (int16) is below this value move in this step.

        `move_probability · 65536` is rarely a whole number. Taking differences of its floored multiples distributes the
        fraction over the steps, so that the mean over many steps is exact.
        """
        moves_per_step = self.grid.move_probability * 65536
        return math.floor((step + 1) * moves_per_step) - math.floor(step * moves_per_step) - 32768


def unpack_codes(stored: StoredRates, scratch: ScratchViews) -> torch.Tensor:
    """The code of every element, int16."""
    codes = scratch.codes.copy_(stored["low"])
    # Expand each byte of `high` into 4 planes, keep the plane's two bits, and move them to bits 8 and 9 by a
    # multiplication. The planes in order are the elements in order.
    torch.bitwise_and(stored["high"].unsqueeze(1), scratch.bits.bit_pairs, out=scratch.quads)
    scratch.high_bits_in_quads.copy_(scratch.quads).mul_(scratch.bits.to_high_bits)
    return codes.add_(scratch.high_bits)


def pack_codes(codes: torch.Tensor, stored: StoredRates, scratch: ScratchViews) -> None:
    """Store the codes: the inverse of `unpack_codes`."""
    stored["low"].copy_(codes)  # the conversion to uint8 keeps bits 0–7
    # Bits 8 and 9 of each element, moved to its plane's place in a byte; then the 4 planes are ORed together.
    torch.bitwise_right_shift(codes, scratch.bits.byte_shift, out=scratch.high_bits)
    scratch.quads.copy_(scratch.high_bits_in_quads).mul_(scratch.bits.to_pair_position)
    fold_planes(scratch.quad_folds)
    stored["high"].copy_(scratch.quad)


def sign_agreement(signs: torch.Tensor, scratch: ScratchViews) -> torch.Tensor:
    """Compare the signs of the new updates with those of the last ones, and store the new ones in `signs`.

    On entry `scratch.moves` holds the signs of the updates (1, 0, -1, int8); on return, and as the result, 1 where the
    sign is that of the last update, -1 where it is the opposite. An update of zero gives 0, and counts as positive in
    the next comparison.
    """
    bits, planes = scratch.bits, scratch.planes
    torch.bitwise_and(planes, bits.one, out=scratch.nonzero)  # 1 and -1 are odd, 0 is not
    # Pack: -1 has all bits set and 1 is clamped to 0, so masking leaves the plane's bit of each negative element;
    # ORing the 8 planes gives one byte for 8 elements.
    torch.clamp(scratch.planes_signed, max=0, out=scratch.octets_signed)
    scratch.octets.bitwise_and_(bits.sign_bits)
    fold_planes(scratch.octet_folds)
    # Unpack old XOR new: a plane's bit is set where the sign changed. moves = nonzero - 2 · changed.
    torch.bitwise_and(signs.bitwise_xor_(scratch.octet).unsqueeze(1), bits.sign_bits, out=planes)
    signs.copy_(scratch.octet)
    planes.clamp_(max=1).bitwise_and_(scratch.nonzero)  # 1 where the sign changed
    torch.sub(scratch.nonzero, planes, alpha=2, out=planes)
    return scratch.moves
