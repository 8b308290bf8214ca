"""Random numbers of an optimizer that no state stands behind: functions of seed, step, parameter name and element.

A resumed run draws what it would have drawn, and another parameter more or less changes nobody's numbers. One row of
random bits is drawn per step and tensor size; each parameter reads it turned by an offset of its own (modulo 2**16: a
Cranley-Patterson rotation), hashed on the device from its name and the step. Nothing is seeded per tensor, and nothing
waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

HALF = 1 << 15
ODD_A, ODD_B = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
"""Multipliers of SplitMix64's kind: odd, with no pattern in their bits."""


def name_keys(names: Sequence[str], device: torch.device) -> torch.Tensor:
    """One 64-bit number per name, as a column."""
    keys = [_as_int64(xxhash.xxh3_64_intdigest(name.encode())) for name in names]
    return torch.tensor(keys, dtype=torch.int64, device=device).unsqueeze(1)


class StochasticBits:
    """The random numbers of one step."""

    def __init__(self, seed: int, step: int) -> None:
        self._seed = seed
        self._step = step
        self._rows: dict[tuple[torch.device, int], torch.Tensor] = {}

    def draw(self, keys: torch.Tensor, count: int, purpose: int) -> torch.Tensor:
        """`count` numbers for each of the keys, uniform over int16. Different purposes get different numbers."""
        hashes = keys ^ _as_int64(_hash_numbers(self._seed, self._step, purpose))
        for multiplier in (ODD_A, ODD_B):
            hashes = hashes * _as_int64(multiplier)
            hashes = hashes ^ (hashes >> 32)
        offsets = (hashes & 0xFFFF).sub_(HALF).to(torch.int16)
        return self._row(keys.device, count) + offsets

    def _row(self, device: torch.device, count: int) -> torch.Tensor:
        if (device, count) not in self._rows:
            # torch's CPU generator looks at 32 bits of its seed only.
            generator = torch.Generator(device).manual_seed(_hash_numbers(self._seed, self._step, count) & 0xFFFFFFFF)
            bits = torch.randint(-HALF, HALF, (1, count), generator=generator, dtype=torch.int16, device=device)
            self._rows[device, count] = bits
        return self._rows[device, count]


def stochastic_round_to_bf16(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """fp32 as one of its two bf16 neighbours, the nearer one the likelier: the mean over the noise is the value.

    bf16 is the upper half of an fp32's bits; 16 random bits carry into it as often as the lower half is large.
    """
    bits = values.view(torch.int32) + noise.to(torch.int32).bitwise_and_(0xFFFF)
    return bits.bitwise_and_(-0x10000).view(torch.float32).to(torch.bfloat16)


def _hash_numbers(*numbers: int) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(number.to_bytes(16, "little", signed=True) for number in numbers))


def _as_int64(number: int) -> int:
    """64 bits as torch's int64 reads them."""
    return number - (1 << 64) if number >> 63 else number
