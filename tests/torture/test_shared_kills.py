"""Runs whose processes share out all weights, and so their checkpoints, of which one after the other is killed."""

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
def test_a_run_in_shards_whose_ranks_are_killed_again_and_again_ends_with_the_same_bits(tmp_path: Path) -> None:
    """A save after every step: most kills come while one is being written."""
    run_launched(2, train, a_run(tmp_path, "whole", 2, **BLOCKS))  # and the caches that are the same for all
    begun = time.perf_counter()
    assert [done.step for done in run_launched(2, train, a_run(tmp_path, "timed", 2, **BLOCKS))] == [STEPS, STEPS]
    usual_s = time.perf_counter() - begun
    chance, done, rounds = random.Random(11), 0, 0
    while done < KILLS:
        rounds += 1
        name = f"killed-{rounds}"
        path = a_run(tmp_path, name, 2, **BLOCKS)
        for _ in range(6):
            done += killed_after(path, 2, chance.randrange(2), chance.uniform(0.3 * usual_s, usual_s))
        run_launched(2, train, path)
        check_same(tmp_path, name)
