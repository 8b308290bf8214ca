"""Processes of one node that fill one store: each entry is made by one of them, and if one fails, all fail."""

from __future__ import annotations

import itertools
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from supertuner.arena import locks
from supertuner.arena.node_peers import NodePeers
from supertuner.cache.work_queue import EntryQueue, chunk_size
from supertuner.core.waiting import MarkKind, marks_by_thread
from tests.cache.peer_processes import fill, kill_ranks
from tests.cache.store_helpers import CountingEncoder, contents, store
from tests.distributed.ranks import launched_ranks, run_launched


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_processes_make_entries_each_once_and_into_one_arena(tmp_path: Path, ranks: int) -> None:
    results = run_launched(ranks, fill, tmp_path, 50, -1, "")
    made = Counter(content for _, by_rank, _ in results for content in by_rank)
    assert made == Counter(contents(50)), "every entry is made exactly once"
    assert all(by_rank for _, by_rank, _ in results), "every process takes part"
    assert {total for total, _, _ in results} == {50}
    assert {shown["encoding latents"] for _, _, shown in results} == {50}, "every process shows the progress of all"
    assert [name for name in (tmp_path / "home").iterdir() if name.name.startswith(".peers")] == []


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("total", [0, 1, 7, 1000])
def test_chunks_shrink_until_the_last_has_one_entry(total: int, workers: int) -> None:
    remaining, chunks = total, []
    while remaining:
        chunks.append(chunk_size(remaining, workers))
        remaining -= chunks[-1]
    assert sum(chunks) == total and chunks == sorted(chunks, reverse=True) and max(chunks, default=1) <= 32
    assert chunks[-1:] in ([], [1])


def test_a_queue_waits_for_its_lock_however_long_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder may be stopped: the watchdog knows when to end that, and which rank it is."""
    peers, arena = NodePeers(0, 2, tmp_path), tmp_path / "arena"
    clock = itertools.count(0, 1000)  # at each look it is 1,000 s later
    monkeypatch.setattr(locks, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep))
    with EntryQueue.publish(peers, arena, np.arange(3)) as queue, ThreadPoolExecutor(1) as other:
        joined = EntryQueue.join(peers, arena)
        assert joined is not None
        with joined:
            with queue._locked():
                state = other.submit(joined.state)
                while next(clock) < 100_000 and not state.done():
                    time.sleep(0.01)
                ((mark,),) = marks_by_thread().values()
            assert state.result().total == 3
    assert mark == (MarkKind.WAITS_FOR_RANKS, "the queue of cache entries")


def test_if_one_process_fails_all_fail_with_its_error(tmp_path: Path) -> None:
    with launched_ranks(3, fill, tmp_path, 50, 1, "fail") as ranks:
        for outcome in ranks.ended():
            assert outcome.error is not None and "sample 7 is broken; remove it" in outcome.error.splitlines()[-1]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_all_others_name_a_killed_process_and_the_next_fill_continues(tmp_path: Path, rank: int) -> None:
    with launched_ranks(3, fill, tmp_path, 50, rank, "wait") as ranks:
        while not (tmp_path / "waiting").exists():
            time.sleep(0.01)
        killed = ranks.pids[rank]
        ranks.signal(rank, signal.SIGKILL)
        outcomes = ranks.ended()
    for number, outcome in enumerate(outcomes):
        if number == rank:
            assert outcome.exitcode == -signal.SIGKILL
        else:
            last = (outcome.error or "").splitlines()[-1]
            assert f"process {rank} of the 3 of this node (pid {killed}) ended without recording a reason" in last
    encoder = CountingEncoder(contents(50))
    with store(tmp_path / "home", life="run") as filled:
        filled.fill(encoder.request())
        assert len(encoder.made) <= 50 - 2, "committed entries are not made again"
        assert len(filled.entries) == 50


@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_make_the_entries_of_a_stopped_process(tmp_path: Path, rank: int) -> None:
    results = run_launched(2, fill, tmp_path, 50, rank, "stop")
    assert len(set(results[0][1]) | set(results[1][1])) == 50
    assert len(results[1 - rank][1]) >= 40


def test_processes_killed_repeatedly_make_every_entry_and_no_committed_one_twice(tmp_path: Path) -> None:
    made_twice = kill_ranks(tmp_path, times=4, ranks=2, seed=1, count=120)
    assert made_twice <= 4 * 2, "at each kill, every rank has at most one entry that is made but not committed"
