"""One learning rate per weight, moved by a fixed bump up or down at every step, in 10 bits; and signs in one.

A rate that moves by ±`bump` between two limits has few values: `lowest + n · unit`, the unit being the bump, rounded so
that it divides the range. Wherever the range has at most 1,023 bumps (1e-6 in 1e-7 … 1e-3 has 1,000), n is kept and
nothing is lost. In a longer range the unit is 1/1,023 of it, and n moves by one with probability bump / unit: the mean
rate still moves by a bump, and no rate ever freezes.

    low     uint8   [n]        bits 0–7 of n
    high    uint8   [n / 4]    bits 8–9: byte j holds elements j, j + n/4, j + 2n/4, j + 3n/4, lowest bits first
    signs   uint8   [n / 8]    whether the last update was negative: byte j holds elements j, j + n/8 …

n is the number of elements, rounded up to a multiple of 8: 1.375 bytes an element in all. Tensors of equal size are
worked on as rows of one; every function below takes and gives rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from supertuner.optim.automagic.workspace import ScratchViews, fold_planes

StoredRates: TypeAlias = Mapping[str, torch.Tensor]
NoiseSource: TypeAlias = Callable[[], torch.Tensor]
"""Gives int16 numbers, uniform, one per element."""
MAX_CODE = 1023
"""The largest n of 10 bits."""
QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True, slots=True)
class LearningRateLimits:
    """Where rates start, and how and between what they move."""

    start: float
    bump: float
    lowest: float
    highest: float

    def __post_init__(self) -> None:
        assert self.bump > 0 and 0 < self.lowest <= self.start <= self.highest, f"{self}"


@dataclass(frozen=True, slots=True)
class LearningRateSpread:
    """How the rates of many weights are spread."""

    mean: float
    lowest: float
    quantiles: tuple[float, ...]
    """Those of QUANTILES."""
    highest: float

    def figures(self) -> dict[str, float]:
        """All of it by name: `q10` is the rate that a tenth of the weights are below."""
        quantiles = {f"q{share:.0%}".rstrip("%"): rate for share, rate in zip(QUANTILES, self.quantiles, strict=True)}
        return {"mean": self.mean, "lowest": self.lowest, **quantiles, "highest": self.highest}


@dataclass(frozen=True, eq=False, slots=True)
class RateStepInputs:
    """What a step has to say to all rates of a tensor."""

    step: int
    noise: NoiseSource
    scratch: ScratchViews


class RateStorage(Protocol):
    """How rates are kept. Two ways: packed, and plain fp32 to compare with."""

    lowest: float
    unit: float

    def entries(self, count: int) -> dict[str, tuple[int, torch.dtype]]:
        """What is kept of `count` elements (a multiple of 8): name → length and type."""

    def initialize(self, stored: StoredRates) -> None:
        """All rates at their start."""

    def advance(self, stored: StoredRates, moves: torch.Tensor, inputs: RateStepInputs) -> torch.Tensor:
        """Move each rate by so many bumps (1, 0 or -1, int8); the new rates, in units."""

    def read(self, stored: StoredRates, scratch: ScratchViews) -> torch.Tensor:
        """The rates as they are, fp32."""


class Fp32Rates:
    """fp32, four bytes an element."""

    lowest, unit = 0.0, 1.0

    def __init__(self, limits: LearningRateLimits) -> None:
        self._limits = limits

    def entries(self, count: int) -> dict[str, tuple[int, torch.dtype]]:
        return {"rates": (count, torch.float32)}

    def initialize(self, stored: StoredRates) -> None:
        stored["rates"].fill_(self._limits.start)

    def advance(self, stored: StoredRates, moves: torch.Tensor, inputs: RateStepInputs) -> torch.Tensor:
        rates = stored["rates"].add_(moves.float(), alpha=self._limits.bump)
        return rates.clamp_(self._limits.lowest, self._limits.highest)

    def read(self, stored: StoredRates, scratch: ScratchViews) -> torch.Tensor:
        return stored["rates"].clone()


class PackedRates:
    """10 bits an element."""

    def __init__(self, limits: LearningRateLimits) -> None:
        self._start = limits.start
        self.lowest = limits.lowest
        width = limits.highest - limits.lowest
        self.max_code = min(MAX_CODE, round(width / limits.bump))
        """The largest n in use; its rate is the highest."""
        self.unit = width / self.max_code if self.max_code else limits.bump
        self.move_probability = min(1.0, limits.bump / self.unit) if width > MAX_CODE * limits.bump else 1.0
        """How likely n moves in a step."""

    def entries(self, count: int) -> dict[str, tuple[int, torch.dtype]]:
        return {"low": (count, torch.uint8), "high": (count // 4, torch.uint8)}

    def initialize(self, stored: StoredRates) -> None:
        start_code = self.encode(self._start)
        stored["low"].fill_(start_code % 256)
        stored["high"].fill_(start_code // 256 * 0b01010101)

    def encode(self, rate: float) -> int:
        return max(0, min(self.max_code, round((rate - self.lowest) / self.unit)))

    def advance(self, stored: StoredRates, moves: torch.Tensor, inputs: RateStepInputs) -> torch.Tensor:
        codes = unpack_codes(stored, inputs.scratch)
        if self.move_probability < 1.0:
            moves = moves * (inputs.noise() < self._noise_threshold(inputs.step))
        codes.add_(inputs.scratch.high_bits.copy_(moves)).clamp_(0, self.max_code)
        pack_codes(codes, stored, inputs.scratch)
        return inputs.scratch.rates.copy_(codes).add_(self.lowest / self.unit)

    def read(self, stored: StoredRates, scratch: ScratchViews) -> torch.Tensor:
        return unpack_codes(stored, scratch).to(torch.float32).mul_(self.unit).add_(self.lowest)

    def convert(self, stored: StoredRates, scratch: ScratchViews, lowest: float, unit: float) -> None:
        """Take over rates that were kept in another unit, each to the nearest."""
        rates = unpack_codes(stored, scratch).to(torch.float64).mul_(unit).add_(lowest)
        codes = rates.sub_(self.lowest).div_(self.unit).round_().clamp_(0, self.max_code)
        pack_codes(codes.to(torch.int16), stored, scratch)

    def histogram(self, stored: StoredRates, count: int, scratch: ScratchViews) -> torch.Tensor:
        """How many of the first `count` elements have each n."""
        codes = unpack_codes(stored, scratch)[:, :count].to(torch.float32)
        return torch.histc(codes, MAX_CODE + 1, min=-0.5, max=MAX_CODE + 0.5).double()

    def spread_of_histogram(self, counts: torch.Tensor, factor: float) -> LearningRateSpread | None:
        """What those counts say of the rates; this waits for the device."""
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
        """Noise below this moves n. Of 65,536 values, a whole number: the fraction is made up for in other steps."""
        moves_per_step = self.move_probability * 65536
        return math.floor((step + 1) * moves_per_step) - math.floor(step * moves_per_step) - 32768


def unpack_codes(stored: StoredRates, scratch: ScratchViews) -> torch.Tensor:
    """n of every element, int16."""
    codes = scratch.codes.copy_(stored["low"])
    torch.bitwise_and(stored["high"].unsqueeze(1), scratch.bits.bit_pairs, out=scratch.quads)
    scratch.high_bits_in_quads.copy_(scratch.quads).mul_(scratch.bits.to_high_bits)
    return codes.add_(scratch.high_bits)


def pack_codes(codes: torch.Tensor, stored: StoredRates, scratch: ScratchViews) -> None:
    """The reverse."""
    stored["low"].copy_(codes)  # modulo 256
    torch.bitwise_right_shift(codes, scratch.bits.byte_shift, out=scratch.high_bits)
    scratch.quads.copy_(scratch.high_bits_in_quads).mul_(scratch.bits.to_pair_position)
    fold_planes(scratch.quad_folds)
    stored["high"].copy_(scratch.quad)


def sign_agreement(signs: torch.Tensor, scratch: ScratchViews) -> torch.Tensor:
    """1 where an update has the sign of the last one, -1 where it has the other; `signs` then has the new ones.

    It finds the updates' signs in `tools.moves`, and leaves the result there. An update of zero has no sign: it gives
    0, and counts as positive for the next one.
    """
    bits, planes = scratch.bits, scratch.planes
    torch.bitwise_and(planes, bits.one, out=scratch.nonzero)  # 1 and -1 are odd
    torch.clamp(scratch.planes_signed, max=0, out=scratch.octets_signed)  # -1 has all bits, and only negatives are left
    scratch.octets.bitwise_and_(bits.sign_bits)
    fold_planes(scratch.octet_folds)
    torch.bitwise_and(signs.bitwise_xor_(scratch.octet).unsqueeze(1), bits.sign_bits, out=planes)
    signs.copy_(scratch.octet)
    planes.clamp_(max=1).bitwise_and_(scratch.nonzero)  # 1 where the sign is another
    torch.sub(scratch.nonzero, planes, alpha=2, out=planes)
    return scratch.moves
