"""Ranks of a run with sharded weights and sharded checkpoints are killed again and again."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.faults import LASTING, check_same, killed_after
from tests.distributed.ranks import run_launched
from tests.distributed.runs import STEPS, a_run, train

KILLS = 60
BLOCKS: dict[str, Any] = {
    "adapter": {"type": "full"},
    "parallel": {"strategy": "fsdp"},
    "checkpoints": {**LASTING, "every_steps": 1},
}


@pytest.mark.torture
@pytest.mark.timeout(5400)
def test_a_sharded_run_whose_ranks_are_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    """It saves after every step, so most kills happen during a save."""
    run_launched(2, train, a_run(tmp_path, "whole", 2, **BLOCKS))  # also fills the caches that all runs share
    begun = time.perf_counter()
    assert [done.step for done in run_launched(2, train, a_run(tmp_path, "timed", 2, **BLOCKS))] == [STEPS, STEPS]
    usual_s = time.perf_counter() - begun
    rng, done, rounds = random.Random(11), 0, 0
    while done < KILLS:
        rounds += 1
        name = f"killed-{rounds}"
        path = a_run(tmp_path, name, 2, **BLOCKS)
        for _ in range(6):
            done += killed_after(path, 2, rng.randrange(2), rng.uniform(0.3 * usual_s, usual_s))
        run_launched(2, train, path)
        check_same(tmp_path, name)
