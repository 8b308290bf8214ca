"""The keyed permutation is one-to-one, uniform, and inverted by `inverse`."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from supertuner.data.ordering.bijection import derive_keys, hash_key, inverse, permute


def permutation(size: int, key: int) -> np.ndarray:
    return permute(np.arange(size, dtype=np.uint64), np.full(size, size, np.uint64), np.full(size, key, np.uint64))


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_permute_is_one_to_one_and_inverse_undoes_it(size, key):
    image = permutation(size, key)
    assert sorted(image.tolist()) == list(range(size))
    back = inverse(image, np.full(size, size, np.uint64), np.full(size, key, np.uint64))
    assert back.tolist() == list(range(size))


def test_all_permutations_of_a_small_domain_are_equally_likely():
    for size in (2, 3, 4, 5, 6):
        count = math.factorial(size)
        draws = 120 * count
        keys = derive_keys(np.full(draws, 7, np.uint64), np.arange(draws, dtype=np.uint64)).repeat(size)
        index = np.tile(np.arange(size, dtype=np.uint64), draws)
        images = permute(index, np.full(index.shape, size, np.uint64), keys).reshape(draws, size)
        _, seen = np.unique(images, axis=0, return_counts=True)
        assert len(seen) == count
        chi_square = float(((seen - 120) ** 2 / 120).sum())
        assert chi_square < (count - 1) + 5 * math.sqrt(2 * (count - 1)), f"{size} elements: {chi_square:.0f}"


def test_neighbours_of_a_large_domain_do_not_stay_neighbours():
    """The differences between images of neighbours are uniform over sixteen parts of the domain, for 64 keys in all."""
    size, take = 10_000_019, 4000
    steps = []
    for key in range(64):
        image = permute(
            np.arange(take, dtype=np.uint64), np.full(take, size, np.uint64), np.full(take, hash_key(key), np.uint64)
        ).astype(np.int64)
        steps.append(np.diff(image) % size * 16 // size)
    seen = np.bincount(np.concatenate(steps), minlength=16)
    expected = seen.sum() / 16
    assert ((seen - expected) ** 2 / expected).sum() < 15 + 5 * math.sqrt(30)


def test_one_call_for_many_sizes_and_keys_equals_separate_calls():
    sizes = np.array([1, 2, 17, 1000, 10**12], np.uint64)
    keys = np.array([3, 3, 4, 2**63, 9], np.uint64)
    index = sizes - np.uint64(1)
    joint = permute(index, sizes, keys)
    separate = [permute(index[i : i + 1], sizes[i : i + 1], keys[i : i + 1])[0] for i in range(5)]
    assert joint.tolist() == separate


def test_the_shuffle_is_the_same_on_every_machine_and_in_every_release():
    """Changing these numbers changes the order of every run, so a resumed run would see other samples."""
    assert permutation(8, hash_key("seed", 0)).tolist() == [3, 0, 5, 7, 4, 1, 2, 6]
    assert hash_key("ab", "c") != hash_key("a", "bc") and hash_key(1) != hash_key("1")
