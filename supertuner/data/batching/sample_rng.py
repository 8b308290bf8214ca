"""Chance as a pure function: named draws that depend on seed, dataset, sample and turn, and on nothing else.

A draw is a hash of its name, so the same on every thread, process and machine, and adding one moves no other.
"""

from __future__ import annotations

from dataclasses import dataclass

from supertuner.data.ordering.bijection import hash_key


@dataclass(frozen=True, slots=True)
class SampleRng:
    seed: int
    dataset_id: str
    sample_key: str
    cycle: int
    """The draw's cycle: with repeats 1 and weight 1 the epoch; more often drawn samples get a new turn each time."""

    def uniform(self, name: str, index: int = 0) -> float:
        """From [0, 1), with 53 random bits."""
        return (hash_key(name, index, self.seed, self.dataset_id, self.sample_key, self.cycle) >> 11) / (1 << 53)

    def uniform_between(self, low: float, high: float, name: str) -> float:
        return low + (high - low) * self.uniform(name)

    def integer_below(self, count: int, name: str, index: int = 0) -> int:
        """From 0 to count - 1."""
        return min(int(self.uniform(name, index) * count), count - 1)
