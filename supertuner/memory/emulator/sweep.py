"""One pass of a processor over blocks of managed memory while the GPU is full: who leaves, and who is there at the end.

Counts only, so that a pass over a hundred gigabytes takes milliseconds; the pages themselves are moved afterwards, at
once. Exactly least-recently-used, block by block: a block that is evicted before the pass reaches it must come back.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from supertuner.memory.emulator.page_table import ON_GPU, Numbers, Region


@dataclass(frozen=True, slots=True)
class Pass:
    """Pages of one region, in order, as counts for each block that they are in."""

    region: Region
    pages: Numbers
    blocks: list[int]
    """Numbers in the region."""
    touched: list[int]
    missing: list[int]
    """Of the touched, not on the GPU at the beginning."""
    coming: list[int]
    """Of the missing, those that are with the host: they cross the link."""
    ends: list[int]
    """Where each block's pages end in `pages`."""

    @classmethod
    def over(cls, region: Region, pages: Numbers) -> Pass:
        numbers, state = pages // region.block_pages, region.state[pages]
        starts = run_starts(numbers)
        ends = np.append(starts[1:], len(pages))
        absent = (state & ON_GPU) == 0
        missing = np.add.reduceat(absent, starts, dtype=np.int64)
        coming = np.add.reduceat(absent & (state != 0), starts, dtype=np.int64)
        return cls(
            region, pages, numbers[starts].tolist(), (ends - starts).tolist(), missing.tolist(), coming.tolist(),
            ends.tolist(),
        )  # fmt: skip


@dataclass(slots=True)
class Outcome:
    free: int
    """Pages that are free on the GPU."""
    blocks: int = 0
    """How many blocks of the pass were done; fewer than all if there was no one left to evict."""
    up: int = 0
    down: int = 0
    arrived: int = 0
    evicted: dict[int, Region] = field(default_factory=dict)
    """Blocks, by their number in the address space, that left at least once."""
    settled: dict[int, int] = field(default_factory=dict)
    """Blocks of the pass that are on the GPU at the end, and how many pages of each."""


def run_starts(numbers: Numbers) -> Numbers:
    """Where each run of equal numbers begins."""
    return np.concatenate(([0], np.flatnonzero(numbers[1:] != numbers[:-1]) + 1))


def sweep(recent: OrderedDict[int, Region], todo: Pass, free: int, hits_refresh: bool) -> Outcome:
    """Play the pass on `recent`, which is brought up to date; pages and accounts are left to the caller."""
    region, base = todo.region, todo.region.first_block
    done = Outcome(free)
    evicted, settled = done.evicted, done.settled
    for block, touched, missing, coming in zip(todo.blocks, todo.touched, todo.missing, todo.coming, strict=True):
        key = base + block
        there = key in recent
        if key in evicted:
            missing, coming = touched, touched - (missing - coming)  # what was never populated crosses no link
        if there and (hits_refresh or missing):
            recent.move_to_end(key)
        while done.free < missing:
            victim = next(iter(recent), key)
            if victim == key:
                return done
            owner = recent.pop(victim)
            left = settled.pop(victim) if victim in settled else int(owner.gpu_pages[victim - owner.first_block])
            evicted[victim] = owner
            done.free += left
            done.down += left
        before = int(region.gpu_pages[block]) if there else 0
        settled[key] = before + missing
        recent[key] = region
        done.free -= missing
        done.up += coming
        done.arrived += missing
        done.blocks += 1
    return done
