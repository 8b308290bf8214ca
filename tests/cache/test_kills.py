"""SIGKILL while a cache is filled: the next process continues and ends with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cache.kills import kill_fillers


@pytest.mark.parametrize("life", ["until_removed", "run"])
def test_the_next_process_continues_after_kills_and_makes_no_committed_entry_again(tmp_path: Path, life: str) -> None:
    kill_fillers(tmp_path, times=25, seed=7, life=life)
