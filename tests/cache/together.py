"""Work of the processes of a node in tests: what each of them runs, as functions that a fork server can begin."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from supertuner.arena.home import Home
from supertuner.arena.peers import Peers, meet
from supertuner.cache.filling import Stopped, Wanted
from supertuner.config.launched import Launched
from supertuner.core.errors import CacheError
from supertuner.core.events import Phase, Silence
from supertuner.core.host import Host
from tests.cache.making import Encoder, contents, same, store


def until_all(folder: Path, name: str, number: int, count: int) -> None:
    """A barrier of files."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}-{number}").touch()
    while len(list(folder.glob(f"{name}-*"))) < count:
        time.sleep(0.005)


@contextmanager
def met(tmp: Path, place: Launched) -> Iterator[Peers]:
    """The peers of a test, in the home below `tmp`."""
    number, count = place.local_rank, place.local_ranks
    gathered = partial(until_all, tmp / "barrier", "met", number, count)
    with meet(Home(tmp / "home"), "test", number, count, gathered) as peers:
        yield peers


class Shown(Silence):
    """Progress that adds up what it is told."""

    def __init__(self) -> None:
        self.items: dict[str, int] = {}

    def phase(self, title: str, *, items: int = 0, nbytes: int = 0, noun: str = "files") -> Phase:
        shown = self

        class Counting:
            def advance(self, items: int = 0, nbytes: int = 0) -> None:
                shown.items[title] = shown.items.get(title, 0) + items

            def __enter__(self):
                return self

            def __exit__(self, *of) -> None:
                pass

        return Counting()


class Meeting(Encoder):
    """After its first entry it waits until every process has made one: nobody is late. Then `then` happens."""

    def __init__(self, tmp: Path, place: Launched, count: int, then: str = "") -> None:
        super().__init__(contents(count))
        self._tmp, self._place, self._then = tmp, place, then

    def make(self, places):
        for place, entry in super().make(places):
            yield place, entry
            if len(self.made) == 1:
                until_all(self._tmp / "barrier", "made", self._place.rank, self._place.ranks)
                self._now()

    def _now(self) -> None:
        if self._then == "fail":
            raise CacheError("sample 7 is broken; remove it")
        if self._then == "wait":
            (self._tmp / "waiting").touch()
            threading.Event().wait()


def fill(place: Launched, tmp: Path, count: int, rank: int, then: str) -> tuple[int, list[bytes], dict[str, int]]:
    """Fill a store together; `then` happens to `rank` after its first entry. What it made, and what was shown."""
    encoder, shown = Meeting(tmp, place, count, then if place.rank == rank else ""), Shown()
    with met(tmp, place) as peers, store(tmp / "home", life="run") as filled:
        stop = partial(_stops, encoder, place.rank == rank and then == "stop")
        try:
            made = filled.fill(
                Wanted(encoder.keys, encoder.make), host=Host(), progress=shown, stop=stop, peers=peers
            )
        except Stopped:
            until_all(tmp / "barrier", "done", place.rank, place.ranks)
            return 0, encoder.made, shown.items
        refs = filled.find(encoder.keys)
        assert all(same(filled.entries.entry(int(ref)), encoder.entry(i)) for i, ref in enumerate(refs))
        assert len(filled.entries) == count
        assert len([name for name in os.listdir(tmp / "home") if name.startswith("latents")]) == 1
        until_all(tmp / "barrier", "done", place.rank, place.ranks)
        return made, encoder.made, shown.items


def _stops(encoder: Encoder, here: bool) -> bool:
    return here and len(encoder.made) > 1
