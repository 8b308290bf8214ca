"""The gradients of a window do not depend on the number of ranks: 1×8, 2×4 and 4×2 agree."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

from supertuner.distributed.process_group import ProcessGroup, SingleProcess
from supertuner.models.spec import ModelSource
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Array, WindowRecord, little_windows, wan_windows
from tests.models.families.pipelines import tiny_wan

__all__ = ["tiny_wan"]

KINDS = ("lora", "lokr", "full")
RAGGED: dict[str, Any] = {"ramp": (1, 9, 24), "total": 45, "sizes": (9, 4, 7), "batch_size": 2}
"""Windows of 1 to 9 samples of three buckets: batches are ragged, and of four processes some have nothing to do."""


def _all_kinds(parallel: ProcessGroup, source: ModelSource) -> dict[str, WindowRecord]:
    """8 samples in batches of one; then windows in which some ranks have no samples."""
    return {kind: wan_windows(parallel, source, kind, samples=(8, 3, 1)) for kind in KINDS}


def _ragged(parallel: ProcessGroup, **changed: Any) -> WindowRecord:
    return little_windows(parallel, **{**RAGGED, **changed})


def farthest(left: Mapping[str, Array], right: Mapping[str, Array]) -> float:
    """The largest difference of any value, relative to the largest value of its tensor or 1."""
    assert left.keys() == right.keys() and left
    return max(
        float(np.abs(left[name] - right[name]).max() / max(1.0, float(np.abs(right[name]).max()))) for name in left
    )


def assert_same_windows(made: WindowRecord, expected: WindowRecord, tolerance: float = 1e-6) -> None:
    assert len(made.gradients) == len(expected.gradients) > 0
    for mine, theirs in zip(made.gradients, expected.gradients, strict=True):
        assert farthest(mine, theirs) <= tolerance
    assert made.losses == pytest.approx(expected.losses, rel=tolerance)
    assert made.norms == pytest.approx(expected.norms, rel=tolerance)


def assert_same_bits(left: WindowRecord, right: WindowRecord) -> None:
    assert (left.losses, left.norms) == (right.losses, right.norms)
    for mine, theirs in zip(left.gradients, right.gradients, strict=True):
        assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)
    assert all(np.array_equal(left.weights[name], right.weights[name]) for name in right.weights)


@pytest.fixture(scope="module")
def alone(tiny_wan: ModelSource) -> dict[str, WindowRecord]:
    """On one process: 1×8."""
    return _all_kinds(SingleProcess(), tiny_wan)


@pytest.mark.parametrize("ranks", [2, 4])
def test_eight_micro_batches_have_the_same_gradient_on_any_number_of_processes(
    tiny_wan: ModelSource, alone: dict[str, WindowRecord], ranks: int
) -> None:
    found = run_ranks(ranks, _all_kinds, tiny_wan)
    for kind in KINDS:
        assert_same_windows(found[0][kind], alone[kind])
        assert all(np.abs(gradient).max() > 0 for gradient in found[0][kind].gradients[0].values()), kind
        for other in found[1:]:
            assert_same_bits(other[kind], found[0][kind])


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_growing_ramp_over_ragged_buckets_has_the_gradients_of_one_process(ranks: int) -> None:
    expected = _ragged(SingleProcess())
    found = run_ranks(ranks, _ragged)
    for made in found:
        assert_same_windows(made, expected)
        assert_same_bits(made, found[0])
    together = [sorted(sum(own, ())) for own in zip(*(made.positions for made in found), strict=True)]
    assert together == [sorted(positions) for positions in expected.positions]
    idle = sum(not own for made in found for own in made.positions)
    assert idle > 0, "a window of one sample leaves somebody without"


def test_in_fp64_the_difference_vanishes() -> None:
    """So the difference in fp32 is rounding, and no sample counts twice or not at all."""
    expected = _ragged(SingleProcess(), double=True)
    for made in run_ranks(3, partial(_ragged, double=True)):
        for mine, theirs in zip(made.gradients, expected.gradients, strict=True):
            assert farthest(mine, theirs) <= 1e-14


def test_an_overflow_on_one_rank_halves_the_scale_on_all_and_no_rank_steps() -> None:
    """Position 7 of a window of 8 belongs to the last rank."""
    fp16: dict[str, Any] = {"ramp": (8, 8, 0), "total": 24, "sizes": (20,), "precision": "fp16", "rate": 1e-3}
    fp16["loud"] = 7
    expected = _ragged(SingleProcess(), **fp16)
    assert expected.scales == [32768.0, 32768.0, 32768.0] and not np.isfinite(expected.norms[0])
    calm = _ragged(SingleProcess(), **{**fp16, "loud": None})
    assert calm.scales == [65536.0] * 3
    for made in run_ranks(4, partial(_ragged, **fp16)):
        assert made.scales == expected.scales
        assert np.isfinite(made.losses).all() and [*map(np.isfinite, made.norms)] == [False, True, True]
        assert made.norms[1:] == pytest.approx(expected.norms[1:], rel=1e-3)
