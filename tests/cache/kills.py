"""Kills processes that fill a store at random moments; used by the default suite and by `make torture`."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

from tests.arena.arena_helpers import fork, wait
from tests.cache.store_helpers import CountingEncoder, contents, same, store


class LoggingEncoder(CountingEncoder):
    """Takes a millisecond for an entry, and logs each entry to a file, which survives a kill."""

    def __init__(self, contents: list[bytes], log: Path) -> None:
        super().__init__(contents)
        self.log = log

    def make(self, indices):
        for index, entry in super().make(indices):
            time.sleep(0.001)
            with self.log.open("ab") as out:
                out.write(self.contents[index] + b"\n")
            yield index, entry


def fill_in_child(home: Path, log: Path, count: int, life: str) -> int:
    def work() -> None:
        encoder = LoggingEncoder(contents(count), log)
        with store(home, life=life) as filled:
            filled.fill(encoder.request())

    return fork(work)


def kill_fillers(tmp: Path, times: int, seed: int, life: str = "until_removed", count: int = 1000) -> int:
    """Kill processes until `times` have died while filling, then let one finish; returns how many entries were made
    more than once."""
    home, log, rng, died = tmp / "home", tmp / "log", random.Random(seed), 0
    log.touch()  # on a busy machine, every kill may come before the first entry
    while died < times:
        pid = fill_in_child(home, log, count, life)
        time.sleep(rng.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
        died += wait(pid) == -signal.SIGKILL
    made = Counter(log.read_bytes().split(b"\n")[:-1])
    encoder = LoggingEncoder(contents(count), log)
    with store(home, life=life) as filled:
        filled.fill(encoder.request())
        refs = filled.find(encoder.keys)
        assert all(same(filled.entries.entry(int(ref)), encoder.entry(i)) for i, ref in enumerate(refs))
        assert len(filled.entries) == count
    made.update(encoder.made)
    assert set(made) == set(encoder.contents)
    assert sum(made.values()) <= count + times, "a committed entry was made again"
    return sum(made.values()) - count
