"""Kills one process of a node while the others wait, and measures the time until the last of them has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path

import torch

from benchmarks import large_set
from supertuner.arena.home import ArenaHome
from supertuner.arena.node_peers import NodePeers, join_node_peers
from supertuner.arena.run_context import RunContext
from supertuner.cache.entries import EntryIndices, EntryRequest, NamedTensors
from supertuner.cache.keys import CacheNamespace
from supertuner.cache.location import cache_placement
from supertuner.cache.store import CacheStore
from supertuner.core.errors import PeerError
from supertuner.data.staging.follower import follow_staging

RANKS = 3
KINDS = ("stager", "encoder")
NOTICED = 3
"""The exit code of a process that ended because it noticed that another one is gone."""


def gathered(folder: Path, name: str, count: int) -> None:
    """Wait until `count` processes have reached this point."""
    (folder / f"{name}-{os.getpid()}").touch()
    while len(list(folder.glob(f"{name}-*"))) < count:
        time.sleep(0.005)


def wait_forever(folder: Path) -> None:
    (folder / "waiting").touch()
    signal.pause()


def stager(folder: Path, peers: NodePeers) -> None:
    """The first process never announces that the dataset is staged."""
    if peers.is_first:
        wait_forever(folder)
    follow_staging(ArenaHome(folder / "home"), "large", "on_demand", RunContext.silent(folder).with_peers(peers))


def encoder(folder: Path, peers: NodePeers) -> None:
    """The second process never encodes the entries that it claimed."""

    def make(numbers: EntryIndices) -> Generator[tuple[int, NamedTensors], None, None]:
        if peers.local_rank == 1:
            wait_forever(folder)
        for number in numbers.tolist():
            time.sleep(0.05)
            yield number, {"latents": torch.zeros(4)}

    place = cache_placement("unified_memory", large_set.config_of(folder), folder, "run").primary
    space = CacheNamespace("latents", "encoder", "float32")
    with CacheStore(place, space, RunContext.silent(folder).with_peers(peers)) as store:
        keys = space.entry_keys(str(number).encode() for number in range(200))
        store.fill(EntryRequest(keys, make))


def rank(kind: str, folder: Path, number: int) -> int:
    try:
        with join_node_peers(
            ArenaHome(folder / "home"), "fault", number, RANKS, partial(gathered, folder, "met", RANKS)
        ) as peers:
            (stager if kind == "stager" else encoder)(folder, peers)
    except PeerError:
        return NOTICED
    return 0


def ended_s(kind: str, folder: Path) -> float:
    """Seconds from the kill until the last of the other processes has ended."""
    command, root = [sys.executable, "-m", "benchmarks.node_faults", kind, str(folder)], Path(__file__).parents[1]
    started = [subprocess.Popen([*command, str(number)], cwd=root) for number in range(RANKS)]
    try:
        while not (folder / "waiting").exists():
            assert all(process.poll() is None for process in started), "a process ended before the kill"
            time.sleep(0.005)
        victim = started[KINDS.index(kind)]
        victim.kill()
        begin = time.perf_counter()
        codes = [process.wait() for process in started if process is not victim]
        taken = time.perf_counter() - begin
        assert codes == [NOTICED] * (RANKS - 1), f"they ended with {codes}"
        return taken
    finally:
        for process in started:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(rank(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
