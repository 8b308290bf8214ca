"""Filling a cache, killed hundreds of times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cache.kills import kill_fillers


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(4))
def test_hundreds_of_killed_fillers_end_with_the_same_entries(tmp_path: Path, seed: int) -> None:
    kill_fillers(tmp_path, times=250, seed=seed, count=6000)
