"""Stateless random numbers per sample: each named draw is a hash of its name, seed, dataset, sample and cycle.

A draw is therefore the same on every thread, process and machine, and a new named draw does not change the others.
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
    """How many times the sample was drawn before. Equals the epoch if repeats and weight are 1."""

    def uniform(self, name: str, index: int = 0) -> float:
        """A float in [0, 1) with 53 random bits."""
        return (hash_key(name, index, self.seed, self.dataset_id, self.sample_key, self.cycle) >> 11) / (1 << 53)

    def uniform_between(self, low: float, high: float, name: str) -> float:
        return low + (high - low) * self.uniform(name)

    def integer_below(self, count: int, name: str, index: int = 0) -> int:
        """An integer from 0 to count - 1."""
        return min(int(self.uniform(name, index) * count), count - 1)
