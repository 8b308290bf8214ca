"""Processes of one node that fill one store: each entry is made by one of them, and nobody outlives a failure."""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from supertuner.cache.work_queue import chunk_size
from supertuner.core.events import NullSink
from supertuner.core.host import HostFacts
from tests.cache.making import CountingEncoder, contents, store
from tests.cache.together import fill, kill_ranks
from tests.distributed.ranks import launched_ranks, run_launched


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_processes_make_entries_each_once_and_into_one_arena(tmp_path: Path, ranks: int) -> None:
    found = run_launched(ranks, fill, tmp_path, 50, -1, "")
    made = Counter(one for _, mine, _ in found for one in mine)
    assert made == Counter(contents(50)), "no entry twice, none left out"
    assert all(mine for _, mine, _ in found), "everybody takes part"
    assert {total for total, _, _ in found} == {50}
    assert {shown["encoding latents"] for _, _, shown in found} == {50}, "everybody shows how far all of them are"
    assert [name for name in (tmp_path / "home").iterdir() if name.name.startswith(".peers")] == []


@pytest.mark.parametrize("sharers", [1, 2, 8])
@pytest.mark.parametrize("total", [0, 1, 7, 1000])
def test_chunks_grow_smaller_until_the_last_is_one(total: int, sharers: int) -> None:
    left, taken = total, []
    while left:
        taken.append(chunk_size(left, sharers))
        left -= taken[-1]
    assert sum(taken) == total and taken == sorted(taken, reverse=True) and max(taken, default=1) <= 32
    assert taken[-1:] in ([], [1])


def test_the_error_of_one_is_the_error_of_all(tmp_path: Path) -> None:
    with launched_ranks(3, fill, tmp_path, 50, 1, "fail") as ranks:
        for outcome in ranks.ended():
            assert outcome.error is not None and "sample 7 is broken; remove it" in outcome.error.splitlines()[-1]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_killed_process_is_named_by_all_others_and_its_entries_are_gone_on_with(tmp_path: Path, rank: int) -> None:
    with launched_ranks(3, fill, tmp_path, 50, rank, "wait") as ranks:
        while not (tmp_path / "waiting").exists():
            time.sleep(0.01)
        killed = ranks.pids[rank]
        ranks.signal(rank, signal.SIGKILL)
        found = ranks.ended()
    for number, outcome in enumerate(found):
        if number == rank:
            assert outcome.exitcode == -signal.SIGKILL
        else:
            last = (outcome.error or "").splitlines()[-1]
            assert f"process {rank} of the 3 of this node (pid {killed}) is gone without a word" in last
    encoder = CountingEncoder(contents(50))
    with store(tmp_path / "home", life="run") as filled:
        filled.fill(encoder.request(), host=HostFacts(), progress=NullSink())
        assert len(encoder.made) <= 50 - 2, "what was committed is not made again"
        assert len(filled.entries) == 50


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_is_stopped_leaves_its_entries_to_the_others(tmp_path: Path, rank: int) -> None:
    found = run_launched(2, fill, tmp_path, 50, rank, "stop")
    assert len(set(found[0][1]) | set(found[1][1])) == 50
    assert len(found[1 - rank][1]) >= 40


def test_killed_again_and_again_they_end_with_every_entry_and_what_was_committed_is_made_once(tmp_path: Path) -> None:
    again = kill_ranks(tmp_path, times=4, ranks=2, seed=1, count=120)
    assert again <= 4 * 2, "at a kill each rank has at most one entry that is made and not committed"
