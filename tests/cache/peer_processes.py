"""What each process of a node runs in tests, as functions that a fork server can start."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from supertuner.arena.home import ArenaHome
from supertuner.arena.node_peers import NodePeers, join_node_peers
from supertuner.cache.store import FillStopped
from supertuner.config.sources.launcher import LauncherEnvironment
from supertuner.core.errors import CacheError
from supertuner.core.events import NullSink, ProgressPhase
from tests.cache.store_helpers import CountingEncoder, contents, context, same, store
from tests.distributed.ranks import RankProcesses, launched_ranks


def until_all(folder: Path, name: str, number: int, count: int) -> None:
    """A barrier of files."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}-{number}").touch()
    while len(list(folder.glob(f"{name}-*"))) < count:
        time.sleep(0.005)


@contextmanager
def meet_peers(tmp: Path, place: LauncherEnvironment) -> Iterator[NodePeers]:
    """Join the peers of a test, in the home below `tmp`."""
    number, count = place.local_rank, place.local_world_size
    gathered = partial(until_all, tmp / "barrier", "met", number, count)
    with join_node_peers(ArenaHome(tmp / "home"), "test", number, count, gathered) as peers:
        yield peers


class ItemCounter(NullSink):
    """Progress that sums up the items of each phase."""

    def __init__(self) -> None:
        self.items: dict[str, int] = {}

    def phase(self, title: str, *, items: int = 0, nbytes: int = 0, noun: str = "files") -> ProgressPhase:
        shown = self

        class Counting:
            def advance(self, items: int = 0, nbytes: int = 0) -> None:
                shown.items[title] = shown.items.get(title, 0) + items

            def __enter__(self):
                return self

            def __exit__(self, *error) -> None:
                pass

        return Counting()


class BarrierEncoder(CountingEncoder):
    """Waits after its first entry until every process has made one, so that all take part. Then `then` happens."""

    def __init__(self, tmp: Path, place: LauncherEnvironment, count: int, then: str = "") -> None:
        super().__init__(contents(count))
        self._tmp, self._place, self._then = tmp, place, then

    def make(self, indices):
        for index, entry in super().make(indices):
            yield index, entry
            if len(self.made) == 1:
                until_all(self._tmp / "barrier", "made", self._place.rank, self._place.world_size)
                self._fail_or_wait()

    def _fail_or_wait(self) -> None:
        if self._then == "fail":
            raise CacheError("sample 7 is broken; remove it")
        if self._then == "wait":
            (self._tmp / "waiting").touch()
            threading.Event().wait()


def fill(
    place: LauncherEnvironment, tmp: Path, count: int, rank: int, then: str
) -> tuple[int, list[bytes], dict[str, int]]:
    """Fill a store with all processes; `then` happens in `rank` after its first entry.

    Returns how many entries were made in all, the contents that this process made, and the items its progress showed.
    """
    encoder, shown = BarrierEncoder(tmp, place, count, then if place.rank == rank else ""), ItemCounter()
    with (
        meet_peers(tmp, place) as peers,
        store(tmp / "home", run_context=context(tmp, progress=shown, peers=peers), life="run") as filled,
    ):
        stop = partial(_should_stop, encoder, place.rank == rank and then == "stop")
        try:
            made = filled.fill(encoder.request(), stop=stop)
        except FillStopped:
            until_all(tmp / "barrier", "done", place.rank, place.world_size)
            return 0, encoder.made, shown.items
        refs = filled.find(encoder.keys)
        assert all(same(filled.entries.entry(int(ref)), encoder.entry(i)) for i, ref in enumerate(refs))
        assert len(filled.entries) == count
        assert len([name for name in os.listdir(tmp / "home") if name.startswith("latents")]) == 1
        until_all(tmp / "barrier", "done", place.rank, place.world_size)
        return made, encoder.made, shown.items


def _should_stop(encoder: CountingEncoder, here: bool) -> bool:
    return here and len(encoder.made) > 1


class SlowEncoder(CountingEncoder):
    """Takes a few milliseconds for an entry, and logs each entry to a file, which survives a kill."""

    def __init__(self, count: int, log: Path) -> None:
        super().__init__(contents(count))
        self._log = log

    def make(self, indices):
        for index, entry in super().make(indices):
            time.sleep(0.003)
            with self._log.open("ab") as out:
                out.write(self.contents[index] + b"\n")
            yield index, entry


def fill_slowly(place: LauncherEnvironment, tmp: Path, turn: int, count: int) -> int:
    """Fill a store with all processes, slowly enough to be killed; returns the number of entries at the end."""
    gathered = partial(until_all, tmp / f"barrier-{turn}", "met", place.rank, place.world_size)
    encoder, home = SlowEncoder(count, tmp / "log"), ArenaHome(tmp / "home")
    with (
        join_node_peers(home, f"turn-{turn}", place.rank, place.world_size, gathered) as peers,
        store(tmp / "home", run_context=context(tmp, peers=peers)) as filled,
    ):
        (tmp / f"met-{turn}").touch()
        filled.fill(encoder.request())
        refs = filled.find(encoder.keys)
        assert all(same(filled.entries.entry(int(ref)), encoder.entry(i)) for i, ref in enumerate(refs))
        return len(filled.entries)


def kill_ranks(tmp: Path, times: int, ranks: int, seed: int, count: int) -> int:
    """Kill a random rank of those that fill a store, `times` times, then let all finish; returns how many entries were
    made more than once."""
    rng, died, turn = random.Random(seed), 0, 0
    while True:
        turn += 1
        with launched_ranks(ranks, fill_slowly, tmp, turn, count) as started:
            if died < times:
                died += _kill_one_rank(tmp, turn, started, rng)
            outcomes = started.ended()
        if all(outcome.ended_well for outcome in outcomes):
            assert [outcome.value for outcome in outcomes] == [count] * ranks
            made = Counter((tmp / "log").read_bytes().split(b"\n")[:-1])
            assert set(made) == set(contents(count))
            return sum(made.values()) - count
        for outcome in outcomes:
            ended = (
                outcome.ended_well or outcome.exitcode == -signal.SIGKILL
            )  # ended_well: the killed rank had finished its work
            assert ended or "PeerError" in (outcome.error or "").splitlines()[-1], outcome.error


def _kill_one_rank(tmp: Path, turn: int, started: RankProcesses, rng: random.Random) -> bool:
    while not (tmp / f"met-{turn}").exists():
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.1))
    try:
        started.signal(rng.randrange(len(started.pids)), signal.SIGKILL)
    except ProcessLookupError:
        return False  # it had finished its work
    return True
