"""Filling a store killed at random moments, again and again; shared by the default suite and by `make torture`."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

from supertuner.cache.fill import EntryRequest
from supertuner.core.events import NullSink
from supertuner.core.host import HostFacts
from tests.arena.making import fork, wait
from tests.cache.making import CountingEncoder, contents, same, store


class LoggingEncoder(CountingEncoder):
    """Writes down each entry that it makes, where a kill cannot undo it; making one takes a millisecond."""

    def __init__(self, contents: list[bytes], log: Path) -> None:
        super().__init__(contents)
        self.log = log

    def make(self, places):
        for place, entry in super().make(places):
            time.sleep(0.001)
            with self.log.open("ab") as out:
                out.write(self.contents[place] + b"\n")
            yield place, entry


def fill_in_child(home: Path, log: Path, count: int, life: str) -> int:
    def work() -> None:
        encoder = LoggingEncoder(contents(count), log)
        with store(home, life=life) as filled:
            filled.fill(EntryRequest(encoder.keys, encoder.make), host=HostFacts(), progress=NullSink())

    return fork(work)


def kill_fillers(tmp: Path, times: int, seed: int, life: str = "until_removed", count: int = 1000) -> int:
    """Kill fillers until `times` have died in the middle, then let one finish; how many times entries were made."""
    home, log, rng, died = tmp / "home", tmp / "log", random.Random(seed), 0
    log.touch()  # on a busy machine every kill may come before the first entry
    while died < times:
        pid = fill_in_child(home, log, count, life)
        time.sleep(rng.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
        died += wait(pid) == -signal.SIGKILL
    made = Counter(log.read_bytes().split(b"\n")[:-1])
    encoder = LoggingEncoder(contents(count), log)
    with store(home, life=life) as filled:
        filled.fill(EntryRequest(encoder.keys, encoder.make), host=HostFacts(), progress=NullSink())
        refs = filled.find(encoder.keys)
        assert all(same(filled.entries.entry(int(ref)), encoder.entry(i)) for i, ref in enumerate(refs))
        assert len(filled.entries) == count
    made.update(encoder.made)
    assert set(made) == set(encoder.contents)
    assert sum(made.values()) <= count + times, "what was committed was made again"
    return sum(made.values()) - count
