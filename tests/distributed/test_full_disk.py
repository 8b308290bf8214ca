"""A full arena folder or disk: every rank reports what did not fit, and not the errors that follow from it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from supertuner.arena.home import HOME_MARKER, ArenaHome
from supertuner.arena.node_peers import join_node_peers
from supertuner.config.sources.launcher import LauncherEnvironment
from supertuner.core.events import NullSink
from tests.cache.peer_processes import until_all
from tests.distributed.ranks import command as command_of
from tests.distributed.ranks import launched_ranks, rank_log, run_launched
from tests.distributed.runs import a_run
from tests.small_disk import small

__all__ = ["small"]


def fill(place: Path) -> None:
    """Take all free space."""
    room = os.statvfs(place)
    (place / ".filler").write_bytes(b"x" * (room.f_bavail * room.f_frsize))


def building(place: LauncherEnvironment, home: Path, barrier: Path) -> None:
    """Rank 0 of a node finds the arena folder full while the others wait for it."""
    gathered = partial(until_all, barrier, "met", place.rank, place.world_size)
    with join_node_peers(ArenaHome(home), "test", place.rank, place.world_size, gathered) as peers:
        if not peers.is_first:
            peers.wait_with_progress("what is made", "the first", NullSink())
        fill(home)
        with ArenaHome(home).build("a"):
            pass


def test_all_ranks_end_with_the_error_of_the_full_arena_folder(tmp_path: Path, small: Path) -> None:
    with launched_ranks(3, building, small, tmp_path / "barrier") as ranks:
        first, *others = [(one.error or "").splitlines()[-1] for one in ranks.ended()]
    assert first.startswith("supertuner.core.errors.ArenaFullError: ")
    assert "/a/head: No space left on device" in first and "supertuner arena rm" in first
    words = first.partition(": ")[2]
    assert all("PeerError: process 0 of the 3 of this node (pid " in one and one.endswith(words) for one in others)
    assert not list(small.glob(".peers-*"))


def test_all_ranks_name_an_arena_folder_that_is_full_from_the_start(tmp_path: Path, small: Path) -> None:
    (small / HOME_MARKER).touch()
    fill(small)
    path = a_run(tmp_path, "run", 2, arena={"home": str(small)})
    assert run_launched(2, command_of, tmp_path, "train", str(path)) == [1, 1]
    for rank in range(2):
        words = " ".join(rank_log(tmp_path, rank).split())
        assert f"{small}/.peers-" in words and "No space left on device" in words and "name another home" in words
