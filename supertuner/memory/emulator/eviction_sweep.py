"""One pass of a processor over blocks of managed memory while the GPU is full: who leaves, and who is there at the end.

Counts only, so that a pass over a hundred gigabytes takes milliseconds; the pages themselves are moved afterwards, at
once. Exactly least-recently-used, block by block: a block that is evicted before the pass reaches it must come back.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from supertuner.memory.emulator.page_table import ON_GPU, MemoryRegion, PageNumbers


@dataclass(frozen=True, slots=True)
class EvictionPass:
    """Pages of one region, in order, as counts for each block that they are in."""

    region: MemoryRegion
    pages: PageNumbers
    blocks: list[int]
    """Numbers in the region."""
    touched: list[int]
    missing: list[int]
    """Of the touched, not on the GPU at the beginning."""
    from_host: list[int]
    """Of the missing, those that are with the host: they cross the link."""
    ends: list[int]
    """Where each block's pages end in `pages`."""

    @classmethod
    def from_pages(cls, region: MemoryRegion, pages: PageNumbers) -> EvictionPass:
        numbers, state = pages // region.block_pages, region.state[pages]
        starts = run_starts(numbers)
        ends = np.append(starts[1:], len(pages))
        absent = (state & ON_GPU) == 0
        missing = np.add.reduceat(absent, starts, dtype=np.int64)
        from_host = np.add.reduceat(absent & (state != 0), starts, dtype=np.int64)
        return cls(
            region, pages, numbers[starts].tolist(), (ends - starts).tolist(), missing.tolist(), from_host.tolist(),
            ends.tolist(),
        )  # fmt: skip


@dataclass(slots=True)
class SweepResult:
    free_pages: int
    """Pages that are free on the GPU."""
    blocks_done: int = 0
    """How many blocks of the pass were done; fewer than all if there was no one left to evict."""
    to_device: int = 0
    to_host: int = 0
    arrived: int = 0
    evicted: dict[int, MemoryRegion] = field(default_factory=dict)
    """Blocks, by their number in the address space, that left at least once."""
    resident_blocks: dict[int, int] = field(default_factory=dict)
    """Blocks of the pass that are on the GPU at the end, and how many pages of each."""


def run_starts(numbers: PageNumbers) -> PageNumbers:
    """Where each run of equal numbers begins."""
    return np.concatenate(([0], np.flatnonzero(numbers[1:] != numbers[:-1]) + 1))


def sweep_blocks(
    lru_blocks: OrderedDict[int, MemoryRegion], eviction_pass: EvictionPass, free_pages: int, hits_refresh: bool
) -> SweepResult:
    """Play the pass on `recent`, which is brought up to date; pages and accounts are left to the caller."""
    region, base = eviction_pass.region, eviction_pass.region.first_block
    result = SweepResult(free_pages)
    evicted, resident_blocks = result.evicted, result.resident_blocks
    for block, touched, missing, from_host in zip(
        eviction_pass.blocks, eviction_pass.touched, eviction_pass.missing, eviction_pass.from_host, strict=True
    ):
        key = base + block
        was_resident = key in lru_blocks
        if key in evicted:
            missing, from_host = touched, touched - (missing - from_host)  # what was never populated crosses no link
        if was_resident and (hits_refresh or missing):
            lru_blocks.move_to_end(key)
        while result.free_pages < missing:
            victim = next(iter(lru_blocks), key)
            if victim == key:
                return result
            owner = lru_blocks.pop(victim)
            evicted_pages = (
                resident_blocks.pop(victim)
                if victim in resident_blocks
                else int(owner.gpu_pages[victim - owner.first_block])
            )
            evicted[victim] = owner
            result.free_pages += evicted_pages
            result.to_host += evicted_pages
        before = int(region.gpu_pages[block]) if was_resident else 0
        resident_blocks[key] = before + missing
        lru_blocks[key] = region
        result.free_pages -= missing
        result.to_device += from_host
        result.arrived += missing
        result.blocks_done += 1
    return result
