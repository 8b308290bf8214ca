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

from supertuner.optim.automagic.workspace import Tools, fold

Stored: TypeAlias = Mapping[str, torch.Tensor]
Noise: TypeAlias = Callable[[], torch.Tensor]
"""Gives int16 numbers, uniform, one per element."""
MOST = 1023
"""The largest n of 10 bits."""
QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True, slots=True)
class Limits:
    """Where rates start, and how and between what they move."""

    start: float
    bump: float
    lowest: float
    highest: float

    def __post_init__(self) -> None:
        assert self.bump > 0 and 0 < self.lowest <= self.start <= self.highest, f"{self}"


@dataclass(frozen=True, slots=True)
class Spread:
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
class Move:
    """What a step has to say to all rates of a tensor."""

    step: int
    noise: Noise
    tools: Tools


class Rates(Protocol):
    """How rates are kept. Two ways: packed, and plain fp32 to compare with."""

    lowest: float
    unit: float

    def entries(self, count: int) -> dict[str, tuple[int, torch.dtype]]:
        """What is kept of `count` elements (a multiple of 8): name → length and type."""

    def begin(self, stored: Stored) -> None:
        """All rates at their start."""

    def advance(self, stored: Stored, moves: torch.Tensor, move: Move) -> torch.Tensor:
        """Move each rate by so many bumps (1, 0 or -1, int8); the new rates, in units."""

    def read(self, stored: Stored, tools: Tools) -> torch.Tensor:
        """The rates as they are, fp32."""


class PlainRates:
    """fp32, four bytes an element."""

    lowest, unit = 0.0, 1.0

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def entries(self, count: int) -> dict[str, tuple[int, torch.dtype]]:
        return {"rates": (count, torch.float32)}

    def begin(self, stored: Stored) -> None:
        stored["rates"].fill_(self._limits.start)

    def advance(self, stored: Stored, moves: torch.Tensor, move: Move) -> torch.Tensor:
        rates = stored["rates"].add_(moves.float(), alpha=self._limits.bump)
        return rates.clamp_(self._limits.lowest, self._limits.highest)

    def read(self, stored: Stored, tools: Tools) -> torch.Tensor:
        return stored["rates"].clone()


class PackedRates:
    """10 bits an element."""

    def __init__(self, limits: Limits) -> None:
        self._start = limits.start
        self.lowest = limits.lowest
        width = limits.highest - limits.lowest
        self.top = min(MOST, round(width / limits.bump))
        """The largest n in use; its rate is the highest."""
        self.unit = width / self.top if self.top else limits.bump
        self.chance = min(1.0, limits.bump / self.unit) if width > MOST * limits.bump else 1.0
        """How likely n moves in a step."""

    def entries(self, count: int) -> dict[str, tuple[int, torch.dtype]]:
        return {"low": (count, torch.uint8), "high": (count // 4, torch.uint8)}

    def begin(self, stored: Stored) -> None:
        code = self.code(self._start)
        stored["low"].fill_(code % 256)
        stored["high"].fill_(code // 256 * 0b01010101)

    def code(self, rate: float) -> int:
        return max(0, min(self.top, round((rate - self.lowest) / self.unit)))

    def advance(self, stored: Stored, moves: torch.Tensor, move: Move) -> torch.Tensor:
        codes = unpacked(stored, move.tools)
        if self.chance < 1.0:
            moves = moves * (move.noise() < self._below(move.step))
        codes.add_(move.tools.parts.copy_(moves)).clamp_(0, self.top)
        pack(codes, stored, move.tools)
        return move.tools.rates.copy_(codes).add_(self.lowest / self.unit)

    def read(self, stored: Stored, tools: Tools) -> torch.Tensor:
        return unpacked(stored, tools).to(torch.float32).mul_(self.unit).add_(self.lowest)

    def convert(self, stored: Stored, tools: Tools, lowest: float, unit: float) -> None:
        """Take over rates that were kept in another unit, each to the nearest."""
        rates = unpacked(stored, tools).to(torch.float64).mul_(unit).add_(lowest)
        codes = rates.sub_(self.lowest).div_(self.unit).round_().clamp_(0, self.top)
        pack(codes.to(torch.int16), stored, tools)

    def counts(self, stored: Stored, count: int, tools: Tools) -> torch.Tensor:
        """How many of the first `count` elements have each n."""
        codes = unpacked(stored, tools)[:, :count].to(torch.float32)
        return torch.histc(codes, MOST + 1, min=-0.5, max=MOST + 0.5).double()

    def spread(self, counts: torch.Tensor, factor: float) -> Spread | None:
        """What those counts say of the rates; this waits for the device."""
        rates = torch.arange(MOST + 1, dtype=torch.float64).mul_(self.unit).add_(self.lowest).mul_(factor)
        numbers = counts.cpu()
        total = float(numbers.sum())
        if not total:
            return None
        below = numbers.cumsum(0)
        ends = torch.tensor([0.0, *QUANTILES, 1.0], dtype=torch.float64).mul_(total).clamp_(min=0.5)
        lowest, *quantiles, highest = rates[torch.searchsorted(below, ends).clamp_(max=MOST)].tolist()
        return Spread(float(numbers @ rates) / total, lowest, tuple(quantiles), highest)

    def _below(self, step: int) -> int:
        """Noise below this moves n. Of 65,536 values, a whole number: the fraction is made up for in other steps."""
        wanted = self.chance * 65536
        return math.floor((step + 1) * wanted) - math.floor(step * wanted) - 32768


def unpacked(stored: Stored, tools: Tools) -> torch.Tensor:
    """n of every element, int16."""
    codes = tools.codes.copy_(stored["low"])
    torch.bitwise_and(stored["high"].unsqueeze(1), tools.bits.pairs, out=tools.quads)
    tools.parts_in_quads.copy_(tools.quads).mul_(tools.bits.down)
    return codes.add_(tools.parts)


def pack(codes: torch.Tensor, stored: Stored, tools: Tools) -> None:
    """The reverse."""
    stored["low"].copy_(codes)  # modulo 256
    torch.bitwise_right_shift(codes, tools.bits.byte, out=tools.parts)
    tools.quads.copy_(tools.parts_in_quads).mul_(tools.bits.up)
    fold(tools.quad_folds)
    stored["high"].copy_(tools.quad)


def directions(signs: torch.Tensor, tools: Tools) -> torch.Tensor:
    """1 where an update has the sign of the last one, -1 where it has the other; `signs` then has the new ones.

    It finds the updates' signs in `tools.moves`, and leaves the result there. An update of zero has no sign: it gives
    0, and counts as positive for the next one.
    """
    bits, planes = tools.bits, tools.planes
    torch.bitwise_and(planes, bits.one, out=tools.some)  # 1 and -1 are odd
    torch.clamp(tools.planes_signed, max=0, out=tools.octets_signed)  # -1 has all bits, and only negatives are left
    tools.octets.bitwise_and_(bits.eight)
    fold(tools.octet_folds)
    torch.bitwise_and(signs.bitwise_xor_(tools.octet).unsqueeze(1), bits.eight, out=planes)
    signs.copy_(tools.octet)
    planes.clamp_(max=1).bitwise_and_(tools.some)  # 1 where the sign is another
    torch.sub(tools.some, planes, alpha=2, out=planes)
    return tools.moves
