"""kill -9 while a cache is filled: the next start goes on, and ends with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cache.kills import kill_fillers


@pytest.mark.parametrize("life", ["until_removed", "run"])
def test_killed_fillers_are_gone_on_with_and_nothing_committed_is_made_twice(tmp_path: Path, life: str) -> None:
    kill_fillers(tmp_path, times=25, seed=7, life=life)
