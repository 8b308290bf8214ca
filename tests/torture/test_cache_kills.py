"""Processes that fill a cache are killed hundreds of times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cache.kills import kill_fillers
from tests.cache.peer_processes import kill_ranks


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(4))
def test_the_cache_has_the_same_entries_after_hundreds_of_killed_fillers(tmp_path: Path, seed: int) -> None:
    kill_fillers(tmp_path, times=250, seed=seed, count=6000)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(2))
def test_the_cache_has_the_same_entries_after_hundreds_of_killed_ranks(tmp_path: Path, seed: int) -> None:
    times, ranks = 100, 3
    assert kill_ranks(tmp_path, times=times, ranks=ranks, seed=seed, count=6000) <= times * ranks
