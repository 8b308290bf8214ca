"""One learning rate per weight in 10 bits, and the sign of its last update in 1 bit.

A rate that moves by ±`bump` between two limits takes few values: `lowest + code · unit`. The unit is the bump, rounded
so that it divides the range between the limits. If the range has at most 1,023 bumps (with a bump of 1e-6, the range
1e-7 … 1e-3 has 1,000), a code of 10 bits stores the rate without loss. In a longer range the unit is 1/1,023 of the
range, and a code moves by one with probability bump / unit: the expected rate still moves by one bump, and no rate gets
stuck.

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

from supertuner.optim.automagic.workspace import ScratchViews, fold_planes

StoredRates: TypeAlias = Mapping[str, torch.Tensor]
NoiseSource: TypeAlias = Callable[[], torch.Tensor]
"""Returns uniform int16 numbers, one per element."""
MAX_CODE = 1023
"""The largest code of 10 bits."""
QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True, slots=True)
class LearningRateLimits:
    """The initial learning rate, the amount by which a rate moves, and the limits between which it moves."""

    start: float
    bump: float
    lowest: float
    highest: float

    def __post_init__(self) -> None:
        assert self.bump > 0 and 0 < self.lowest <= self.start <= self.highest, f"{self}"


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
        self._start = limits.start
        self.lowest = limits.lowest
        width = limits.highest - limits.lowest
        self.max_code = min(MAX_CODE, round(width / limits.bump))
        """The largest code in use; it stands for the highest rate."""
        self.unit = width / self.max_code if self.max_code else limits.bump
        self.move_probability = min(1.0, limits.bump / self.unit) if width > MAX_CODE * limits.bump else 1.0
        """The probability with which a code moves in a step."""

    def entries(self, count: int) -> dict[str, tuple[int, torch.dtype]]:
        """The state of `count` elements (a multiple of 8): name → length and type."""
        return {"low": (count, torch.uint8), "high": (count // 4, torch.uint8)}

    def initialize(self, stored: StoredRates) -> None:
        """Set all rates to the initial rate."""
        start_code = self.encode(self._start)
        stored["low"].fill_(start_code % 256)
        stored["high"].fill_(start_code // 256 * 0b01010101)  # the same two bits four times

    def encode(self, rate: float) -> int:
        return max(0, min(self.max_code, round((rate - self.lowest) / self.unit)))

    def advance(
        self, stored: StoredRates, moves: torch.Tensor, step: int, noise: NoiseSource, scratch: ScratchViews
    ) -> torch.Tensor:
        """Move each rate by `moves` bumps (int8: 1, 0 or -1) and return the new rates in units."""
        codes = unpack_codes(stored, scratch)
        if self.move_probability < 1.0:
            moves = moves * (noise() < self._noise_threshold(step))
        codes.add_(scratch.high_bits.copy_(moves)).clamp_(0, self.max_code)
        pack_codes(codes, stored, scratch)
        return scratch.rates.copy_(codes).add_(self.lowest / self.unit)

    def read(self, stored: StoredRates, scratch: ScratchViews) -> torch.Tensor:
        """The current rates in fp32."""
        return unpack_codes(stored, scratch).to(torch.float32).mul_(self.unit).add_(self.lowest)

    def convert(self, stored: StoredRates, scratch: ScratchViews, lowest: float, unit: float) -> None:
        """Re-encode rates that were stored with another `lowest` and `unit`, each to the nearest code."""
        rates = unpack_codes(stored, scratch).to(torch.float64).mul_(unit).add_(lowest)
        codes = rates.sub_(self.lowest).div_(self.unit).round_().clamp_(0, self.max_code)
        pack_codes(codes.to(torch.int16), stored, scratch)

    def histogram(self, stored: StoredRates, count: int, scratch: ScratchViews) -> torch.Tensor:
        """The number of elements with each code, among the first `count` elements."""
        codes = unpack_codes(stored, scratch)[:, :count].to(torch.float32)
        return torch.histc(codes, MAX_CODE + 1, min=-0.5, max=MAX_CODE + 0.5).double()

    def spread_of_histogram(self, counts: torch.Tensor, factor: float) -> LearningRateSpread | None:
        """The distribution of rates for these counts of codes; None without any. Waits for the device."""
        rates = torch.arange(MAX_CODE + 1, dtype=torch.float64).mul_(self.unit).add_(self.lowest).mul_(factor)
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
        moves_per_step = self.move_probability * 65536
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
