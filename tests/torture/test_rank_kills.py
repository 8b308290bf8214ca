"""Ranks of a distributed run are killed again and again."""

from __future__ import annotations

import time

import pytest

from tests.distributed.faults import LASTING, killed_run
from tests.distributed.ranks import run_launched
from tests.distributed.runs import STEPS, a_run, train

KILLS = 200


@pytest.mark.torture
@pytest.mark.timeout(5400)
def test_a_run_whose_ranks_are_killed_200_times_ends_with_the_same_bits(tmp_path):
    path = a_run(tmp_path, "whole", 2, checkpoints=LASTING)
    run_launched(2, train, path)  # fills the caches that all runs share
    begun = time.perf_counter()
    again = a_run(tmp_path, "timed", 2, checkpoints=LASTING)
    assert [done.step for done in run_launched(2, train, again)] == [STEPS, STEPS]
    killed_run(tmp_path, "killed", 2, KILLS, seed=7, usual_s=time.perf_counter() - begun)
