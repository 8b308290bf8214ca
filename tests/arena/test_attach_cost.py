"""Attaching a further process takes milliseconds and almost no private memory, however many records there are."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from supertuner.arena.home import ArenaHome
from tests.arena.arena_helpers import fork, wait


def private_dirty() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty:"))


def test_a_further_process_takes_no_private_memory(home: ArenaHome) -> None:
    with home.build("a") as arena_build:
        writer = arena_build.open_writer()
        for i in range(20_000):
            with writer.begin(f"{i:09d}") as unit:
                unit.put("media", b"%09d" % i * 600)
        arena_build.seal({})

    def work() -> None:
        out = np.zeros((64, 5400), np.uint8)
        order = np.random.default_rng(0)
        before = private_dirty()
        reader = home.attach("a")
        for _ in range(len(reader) // 64):
            reader.gather(order.integers(0, len(reader), 64), out)
        assert reader.find("000012345") == 12345
        grown = private_dirty() - before
        os.write(2, f"grew by {grown}\n".encode())
        assert grown < 4 << 20, "of 160 MB"

    # A tmpfs page counts as private to its only user, so this process maps the pages as well.
    with home.attach("a") as first:
        for i in range(len(first)):
            first.array(i)[::4096].sum()
        assert wait(fork(work)) == 0
