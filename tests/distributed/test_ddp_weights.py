"""Weights after many steps equal those of one process, within a tolerance that no random seed exceeds.

Gradients on one rank and on several differ by rounding in fp32, and optimizers carry that on. The tolerance: after 10
steps of AdamW the difference is at most 10⁻⁵ of the distance that the weights have moved (Euclidean norms over all
weights of the expert). Automagic branches on signs, so rounding may decide in which direction a rate moves; computed in
fp64, where the signs agree, its weights agree to 10⁻⁷ of the distance.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from supertuner.distributed.process_group import ProcessGroup, SingleProcess
from supertuner.models.spec import ModelSource
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Array, WindowRecord, little32, little_windows, wan, wan_windows
from tests.models.families.pipelines import tiny_wan

__all__ = ["tiny_wan"]

TOLERANCE = 1e-5
TOLERANCE_IN_FP64 = 1e-7
SEEDS = range(8)
RATE = 1e-3


def difference(one: Mapping[str, Array], other: Mapping[str, Array], start: Mapping[str, Array]) -> float:
    """The distance of two end points, relative to the distance from the start."""
    apart = sum(float(np.square(one[name].astype(float) - other[name]).sum()) for name in one)
    way = sum(float(np.square(one[name].astype(float) - start[name]).sum()) for name in one)
    assert way > 0, "nothing was trained"
    return float(np.sqrt(apart / way))


def assert_alike(
    found: list[WindowRecord], expected: WindowRecord, start: Mapping[str, Array], tolerance: float
) -> None:
    for made in found:
        assert difference(expected.weights, made.weights, start) <= tolerance
        assert all(np.array_equal(made.weights[name], found[0].weights[name]) for name in start), "ranks drift apart"


def _little(parallel: ProcessGroup, optimizer: str, double: bool, rate: float) -> list[WindowRecord]:
    """10 windows of 6 to 10 samples of three buckets, for each random seed."""
    shape = {"ramp": (6, 10, 60), "total": 76, "sizes": (9, 4, 7)}
    return [
        little_windows(parallel, **shape, seed=seed, optimizer=optimizer, double=double, rate=rate)  # type: ignore[arg-type]
        for seed in SEEDS
    ]


def _wan(parallel: ProcessGroup, source: ModelSource) -> dict[tuple[str, int], WindowRecord]:
    return {
        (kind, seed): wan_windows(parallel, source, kind, seed=seed, samples=(4,) * 10, rate=RATE, clip=1.0)
        for seed, kind in enumerate(("lora", "full"))
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_adamw_over_seeds(ranks: int) -> None:
    expected = _little(SingleProcess(), "adamw", False, RATE)
    found = run_ranks(ranks, _little, "adamw", False, RATE)
    for seed in SEEDS:
        assert len(expected[seed].losses) == 10
        assert_alike([made[seed] for made in found], expected[seed], _start(seed), TOLERANCE)


def test_a_real_wan_with_a_lora_and_with_all_weights(tiny_wan: ModelSource) -> None:
    expected, found = _wan(SingleProcess(), tiny_wan), run_ranks(2, _wan, tiny_wan)
    for (kind, seed), made in expected.items():
        start = {name: p.detach().numpy() for name, p in wan(tiny_wan, kind, seed).parameters.items()}
        assert_alike([rank[kind, seed] for rank in found], made, start, TOLERANCE)


@pytest.mark.parametrize("ranks", [2, 4])
def test_automagic_in_fp64_over_seeds(ranks: int) -> None:
    expected = _little(SingleProcess(), "automagic", True, 1e-6)
    found = run_ranks(ranks, _little, "automagic", True, 1e-6)
    for seed in SEEDS:
        assert_alike([made[seed] for made in found], expected[seed], _start(seed), TOLERANCE_IN_FP64)


def _start(seed: int) -> dict[str, Array]:
    return {name: p.detach().numpy() for name, p in little32(seed, "adamw").parameters.items()}
