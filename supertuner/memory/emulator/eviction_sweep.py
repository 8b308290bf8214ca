"""Evicts least-recently-used blocks for one pass over managed memory while GPU memory is full.

Works on counts only, so that a pass over a hundred gigabytes takes milliseconds; the caller moves the pages afterwards
in one step. Exactly least-recently-used per block: a block that is evicted before the pass reaches it must be
transferred again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from supertuner.memory.emulator.page_table import ON_GPU, MemoryRegion, PageNumbers


@dataclass(frozen=True, slots=True)
class EvictionPass:
    """Pages of one region in order, as counts per block."""

    region: MemoryRegion
    pages: PageNumbers
    blocks: list[int]
    """Block numbers within the region."""
    touched: list[int]
    missing: list[int]
    """Of the touched pages, those not on the GPU at the start."""
    from_host: list[int]
    """Of the missing pages, those at the host, which cross the link."""
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
    """Free pages on the GPU."""
    blocks_done: int = 0
    """Blocks of the pass that were handled; fewer than all if no block was left to evict."""
    to_device: int = 0
    to_host: int = 0
    arrived: int = 0
    evicted: dict[int, MemoryRegion] = field(default_factory=dict)
    """Blocks that were evicted at least once, by their number in the address space."""
    resident_blocks: dict[int, int] = field(default_factory=dict)
    """Number of each 2 MiB block that is on the GPU after the pass → how many of its pages are there."""


def run_starts(numbers: PageNumbers) -> PageNumbers:
    """The start of each run of equal numbers."""
    return np.concatenate(([0], np.flatnonzero(numbers[1:] != numbers[:-1]) + 1))


def sweep_blocks(
    lru_blocks: OrderedDict[int, MemoryRegion], eviction_pass: EvictionPass, free_pages: int, hits_refresh: bool
) -> SweepResult:
    """Simulate the pass on `lru_blocks`, which is updated; page states and accounts are left to the caller.

    `lru_blocks` is ordered from least to most recently used, so each step is O(1) per block: move the touched block to
    the end, then evict from the front until its missing pages fit.
    """
    region, base = eviction_pass.region, eviction_pass.region.first_block
    result = SweepResult(free_pages)
    evicted, resident_blocks = result.evicted, result.resident_blocks
    for block, touched, missing, from_host in zip(
        eviction_pass.blocks, eviction_pass.touched, eviction_pass.missing, eviction_pass.from_host, strict=True
    ):
        key = base + block
        was_resident = key in lru_blocks
        if key in evicted:
            # The pass itself evicted this block, so all its touched pages are missing now, and all that were ever
            # populated are at the host and cross the link.
            missing, from_host = touched, touched - (missing - from_host)
        if was_resident and (hits_refresh or missing):
            lru_blocks.move_to_end(key)
        while result.free_pages < missing:
            # The block itself is last in the order or not in it. If it comes first, or the order is empty, no other
            # block is left, and the caller handles the rest.
            victim = next(iter(lru_blocks), key)
            if victim == key:
                return result
            owner = lru_blocks.pop(victim)
            # A block that this pass brought in has its count in `resident_blocks`; the region's own count is not
            # updated yet.
            evicted_pages = resident_blocks.pop(victim, None)
            if evicted_pages is None:
                evicted_pages = int(owner.gpu_pages[victim - owner.first_block])
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
