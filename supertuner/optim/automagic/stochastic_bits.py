"""Stateless random numbers for an optimizer: functions of seed, step, parameter name and element index.

A resumed run draws the same numbers as an uninterrupted one, and adding or removing a parameter does not change the
numbers of the others. One row of random bits is drawn per step and tensor size; each parameter adds its own offset to
the row modulo 2**16 (a Cranley-Patterson rotation), which is hashed on the device from its name and the step. No
generator is seeded per tensor, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

HALF = 1 << 15
ODD_A, ODD_B = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
"""Odd 64-bit multipliers without regular bit patterns, as in SplitMix64."""


def name_keys(names: Sequence[str], device: torch.device) -> torch.Tensor:
    """One 64-bit hash per name, as a column."""
    keys = [_as_int64(xxhash.xxh3_64_intdigest(name.encode())) for name in names]
    return torch.tensor(keys, dtype=torch.int64, device=device).unsqueeze(1)


class StochasticBits:
    """The random numbers of one optimizer step."""

    def __init__(self, seed: int, step: int) -> None:
        self._seed = seed
        self._step = step
        self._rows: dict[tuple[torch.device, int], torch.Tensor] = {}

    def draw(self, keys: torch.Tensor, count: int, purpose: int) -> torch.Tensor:
        """`count` numbers for each key, uniform over int16. Different purposes get different numbers."""
        hashes = keys ^ _as_int64(_hash_numbers(self._seed, self._step, purpose))
        for multiplier in (ODD_A, ODD_B):
            hashes = hashes * _as_int64(multiplier)
            hashes = hashes ^ (hashes >> 32)
        offsets = (hashes & 0xFFFF).sub_(HALF).to(torch.int16)
        return self._row(keys.device, count) + offsets

    def _row(self, device: torch.device, count: int) -> torch.Tensor:
        if (device, count) not in self._rows:
            # torch's CPU generator uses only 32 bits of its seed.
            generator = torch.Generator(device).manual_seed(_hash_numbers(self._seed, self._step, count) & 0xFFFFFFFF)
            bits = torch.randint(-HALF, HALF, (1, count), generator=generator, dtype=torch.int16, device=device)
            self._rows[device, count] = bits
        return self._rows[device, count]


def stochastic_round_to_bf16(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round each fp32 value to one of its two bf16 neighbours at random, so that the expectation is the value.

    A bf16 number is the upper half of the bits of an fp32 number. Adding 16 random bits carries into the upper half
    with a probability equal to the lower half divided by 2**16, which is the distance to the lower neighbour.
    """
    bits = values.view(torch.int32) + noise.to(torch.int32).bitwise_and_(0xFFFF)
    return bits.bitwise_and_(-0x10000).view(torch.float32).to(torch.bfloat16)


def _hash_numbers(*numbers: int) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(number.to_bytes(16, "little", signed=True) for number in numbers))


def _as_int64(number: int) -> int:
    """An unsigned 64-bit number with the same bits as a signed one, which torch needs."""
    return number - (1 << 64) if number >> 63 else number
