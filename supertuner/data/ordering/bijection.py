"""A keyed pseudo-random permutation of [0, n) and its inverse, computed per index instead of stored.

The swap-or-not network (Hoang, Morris and Rogaway, "An Enciphering Scheme Based on a Card Shuffle", CRYPTO 2012): a
round pairs every x with k − x (mod n), and a keyed bit of the pair decides whether the two are swapped. It works for
any n without padding, every round is its own inverse, and it reaches every permutation. It uses only integer arithmetic
on arrays, so the result is the same on every machine, and one call handles many indices, sizes and keys.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

U64: TypeAlias = NDArray[np.uint64]

ROUNDS = 24
"""Rounds of the network. With 8, a chi-square test still detects that the permutations of 6 elements are not equally
likely; with 10 it does not. The rest is margin for large domains."""

BLOCK_SIZE = 4096
"""Indices processed together, so that their round keys stay in the CPU's cache."""

MAX_SIZE = 1 << 62
"""Largest domain: sums of two indices stay below 2^63."""

_GOLDEN = 0x9E3779B97F4A7C15


def hash_key(*parts: int | str) -> int:
    """A 64-bit hash of all parts. Parts are length-prefixed, so ("ab", "c") and ("a", "bc") differ."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = str(part).encode()
        digest.update(f"{type(part).__name__}{len(text)}:".encode() + text)
    return int.from_bytes(digest.digest(), "little")


def derive_keys(key: U64, counter: U64) -> U64:
    """A different key for each pair of `key` and `counter`."""
    return _mix(_mix(key) + counter * np.uint64(_GOLDEN))


def permute(index: U64, size: U64, key: U64) -> U64:
    """The image of each `index` under the permutation of [0, size) with this `key`; three arrays of equal shape."""
    return _swap_or_not(index, size, key, slice(None))


def inverse(image: U64, size: U64, key: U64) -> U64:
    """The index that `permute` maps to each `image`."""
    return _swap_or_not(image, size, key, slice(None, None, -1))


def _swap_or_not(index: U64, size: U64, key: U64, rounds: slice) -> U64:
    assert index.shape == size.shape == key.shape, "index, size and key must have the same shape"
    assert not index.size or (bool((index < size).all()) and int(size.max()) <= MAX_SIZE), "an index outside its domain"
    blocks = [slice(begin, begin + BLOCK_SIZE) for begin in range(0, len(index), BLOCK_SIZE)]
    if len(blocks) > 1:
        return np.concatenate([_swap_or_not_block(index[b], size[b], key[b], rounds) for b in blocks])
    return _swap_or_not_block(index, size, key, rounds)


def _swap_or_not_block(index: U64, size: U64, key: U64, rounds: slice) -> U64:
    counters = (np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN))[rounds]
    round_keys = _mix(key + counters[:, None])
    sums = round_keys % size + size
    for round_key, total in zip(round_keys, sums, strict=True):
        partner = total - index
        partner = np.where(partner >= size, partner - size, partner)
        index = np.where(_top_bit(round_key ^ np.maximum(index, partner)), partner, index)
    return index


def _mix(value: U64) -> U64:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit integers that looks random."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _top_bit(value: U64) -> NDArray[np.bool_]:
    """The top bit of `_mix`; the last line of `_mix` does not change it and is omitted."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value >= np.uint64(1 << 63)
