"""The two memories of the software superchip: how full they are, and which pages are evicted when GPU memory is full.

Device memory is allocated and never moved. Managed memory is evicted to the host in whole blocks, least recently used
first. System pages take free memory, evict nothing and stay. A one-pool machine has one account and no migration.
Counts are exact: `gpu_used` is device memory plus, page by page, everything on the GPU.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np

from supertuner.memory.driver import DriverError, MemoryKind
from supertuner.memory.emulator.configuration import ERROR_CODES, EmulatedMachine, EmulatorParameters
from supertuner.memory.emulator.eviction_sweep import EvictionPass, SweepResult, run_starts, sweep_blocks
from supertuner.memory.emulator.page_table import AT_HOST, ON_GPU, MemoryRegion, PageMask, PageNumbers

FEW_BLOCKS: Final = 4
"""Up to this many blocks, handling them one by one is faster than a sweep."""


@dataclass(slots=True)
class MoveCounts:
    """Pages that one operation transferred, evicted and brought to the processor that requested them."""

    to_device: int = 0
    to_host: int = 0
    evicted: int = 0
    arrived: int = 0
    unplaced: int = 0
    """Requested on the GPU, and left at the host for lack of room."""


class PageResidency:
    def __init__(self, machine: EmulatedMachine, parameters: EmulatorParameters, page_bytes: int) -> None:
        self._machine, self._parameters, self._page_bytes = machine, parameters, page_bytes
        self.gpu_used = 0
        self.host_used = 0
        self.movable_bytes = 0
        """Bytes of managed and system memory, populated or not."""
        self._has_copies = False
        """Whether a page may be on both sides."""
        self._evictable_bytes = 0
        """Of `gpu_used`, the bytes of managed pages."""
        self._lru_blocks: OrderedDict[int, MemoryRegion] = OrderedDict()
        """Managed blocks with a page on the GPU, by their number in the address space. The first is evicted first."""

    @property
    def gpu_free(self) -> int:
        return self._machine.gpu_bytes - self.gpu_used

    # ── device memory and reserved memory ────────────────────────────────────────────────────────────────────────────

    def reserve(self, nbytes: int, moved: MoveCounts) -> bool:
        """Reserve GPU memory permanently, evicting managed blocks if needed. False, without any change, if there is too
        little.
        """
        if nbytes > self.gpu_free + self._evictable_bytes:
            return False
        while nbytes > self.gpu_free:
            self._evict_oldest(moved)
        self.gpu_used += nbytes
        return True

    def add_region(self, region: MemoryRegion) -> None:
        """Add a region whose pages can be on either side."""
        self.movable_bytes += region.pages * self._page_bytes

    def remove_region(self, region: MemoryRegion) -> None:
        """Remove a region and free all its pages."""
        self.movable_bytes -= region.pages * self._page_bytes
        self.discard_pages(region, np.arange(region.pages, dtype=np.int64))

    # ── pages ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def populate_pool(self, region: MemoryRegion, pages: slice) -> None:
        """One pool: populate the pages for both processors. Where a real machine would hang for lack of memory, this
        raises.
        """
        missing = region.state[pages] == 0
        nbytes = int(np.count_nonzero(missing)) * self._page_bytes
        if nbytes > self.gpu_free:
            raise _out_of_memory("the pool")
        self.gpu_used += nbytes
        region.state[pages][missing] = AT_HOST

    def move_to_gpu(self, region: MemoryRegion, pages: PageNumbers, keep: PageMask | None, moved: MoveCounts) -> None:
        """Bring these pages to the GPU, in this order; pages that are already there count as used.

        Pages in `keep` keep their copy at the host; None: no page does.
        """
        self._has_copies = self._has_copies or (keep is not None and bool(keep.any()))
        missing = (region.state[pages] & ON_GPU) == 0
        need = int(np.count_nonzero(missing)) * self._page_bytes
        if region.kind is MemoryKind.SYSTEM:
            self._move_what_fits(region, pages[missing], None, moved)
        elif self._has_fixed_place(region) or need <= self.gpu_free:
            self._put_on_gpu(region, pages[missing], _select(keep, missing), moved)
            self._mark_recent(region, pages if self._parameters.hits_refresh else pages[missing])
        elif pages[0] // region.block_pages == pages[-1] // region.block_pages:
            self._move_block(region, pages, keep, moved)
        else:
            self._move_blocks(region, pages, keep, moved)

    def mark_used(self, region: MemoryRegion, blocks: slice) -> None:
        """The GPU used managed blocks that it already holds."""
        if self._parameters.hits_refresh and not self._has_fixed_place(region):
            for block in range(region.first_block + blocks.start, region.first_block + blocks.stop):
                self._lru_blocks.move_to_end(block)

    def move_to_host(self, region: MemoryRegion, pages: PageNumbers, keep: PageMask | None, moved: MoveCounts) -> None:
        """Bring these pages to the host; pages in `keep` stay on the GPU as well."""
        self._has_copies = self._has_copies or (keep is not None and bool(keep.any()))
        state = region.state[pages]
        absent = (state & AT_HOST) == 0
        self._charge_host(int(np.count_nonzero(absent)))
        moved.to_host += int(np.count_nonzero(absent & (state != 0)))
        moved.arrived += int(np.count_nonzero(absent))
        region.state[pages] |= AT_HOST
        self._remove_from_gpu(region, pages if keep is None else pages[~keep])

    def discard_pages(self, region: MemoryRegion, pages: PageNumbers) -> None:
        """Free these pages on both sides."""
        if self._machine.one_pool:
            self.gpu_used -= int(np.count_nonzero(region.state[pages])) * self._page_bytes
            region.state[pages] = 0
            return
        self._remove_from_gpu(region, pages)
        self._remove_from_host(region, pages)

    def keep_only_on_gpu(self, region: MemoryRegion, pages: PageNumbers) -> None:
        """Drop the host's copy of pages that have copies on both sides."""
        if self._has_copies:
            self._remove_from_host(region, pages[region.state[pages] == AT_HOST | ON_GPU])

    def keep_only_at_host(self, region: MemoryRegion, pages: PageNumbers) -> None:
        if self._has_copies:
            self._remove_from_gpu(region, pages[region.state[pages] == AT_HOST | ON_GPU])

    # ── internals ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _has_fixed_place(self, region: MemoryRegion) -> bool:
        """Without concurrent access, managed memory is reserved on the GPU when it is allocated, and stays there."""
        return region.kind is MemoryKind.MANAGED and not self._machine.concurrent

    def _move_blocks(self, region: MemoryRegion, pages: PageNumbers, keep: PageMask | None, moved: MoveCounts) -> None:
        """Bring pages of several blocks while GPU memory is full.

        One sweep over counts where that is exact; one block at a time where pages have copies or host memory may run
        out.
        """
        eviction_pass, done = EvictionPass.from_pages(region, pages), 0
        # No eviction can fail half-way if everything evicted fits into host memory.
        host_has_room = self._machine.host_bytes is None or self.movable_bytes <= self._machine.host_bytes
        if len(eviction_pass.blocks) > FEW_BLOCKS and not self._has_copies and host_has_room:
            free_pages = self.gpu_free // self._page_bytes
            swept = sweep_blocks(self._lru_blocks, eviction_pass, free_pages, self._parameters.hits_refresh)
            self._apply_sweep(eviction_pass, swept, moved)
            done = swept.blocks_done
        for number in range(done, len(eviction_pass.blocks)):
            where = slice(eviction_pass.ends[number - 1] if number else 0, eviction_pass.ends[number])
            self._move_block(region, pages[where], _select(keep, where), moved)

    def _apply_sweep(self, eviction_pass: EvictionPass, swept: SweepResult, moved: MoveCounts) -> None:
        """Apply the result of a sweep to page states, counts and accounts."""
        owners: dict[int, tuple[MemoryRegion, list[int]]] = {}
        for key, owner in swept.evicted.items():
            owners.setdefault(id(owner), (owner, []))[1].append(key - owner.first_block)
        for owner, blocks in owners.values():
            pages = owner.pages_of_blocks(np.array(blocks, np.int64))
            state = owner.state[pages]
            owner.state[pages] = np.where(state & ON_GPU, AT_HOST, state)
            owner.gpu_pages[blocks] = 0
        region = eviction_pass.region
        pages_done = eviction_pass.pages[: eviction_pass.ends[swept.blocks_done - 1] if swept.blocks_done else 0]
        on_gpu = np.zeros(len(region.gpu_pages), np.bool_)  # indexed by block
        resident_blocks = [key - region.first_block for key in swept.resident_blocks]
        on_gpu[resident_blocks] = True
        region.gpu_pages[resident_blocks] = list(swept.resident_blocks.values())
        region.state[pages_done] = np.where(on_gpu[pages_done // region.block_pages], ON_GPU, AT_HOST)
        self._charge_gpu(region, self.gpu_free // self._page_bytes - swept.free_pages)
        self.host_used += (swept.to_host - swept.to_device) * self._page_bytes
        moved.to_device += swept.to_device
        moved.to_host += swept.to_host
        moved.evicted += swept.to_host
        moved.arrived += swept.arrived

    def _move_block(self, region: MemoryRegion, pages: PageNumbers, keep: PageMask | None, moved: MoveCounts) -> None:
        """Bring pages of one block, evicting older blocks; once none is left, the remaining pages stay at the host."""
        missing = (region.state[pages] & ON_GPU) == 0
        block = region.first_block + int(pages[0]) // region.block_pages
        if block in self._lru_blocks and (self._parameters.hits_refresh or missing.any()):
            self._lru_blocks.move_to_end(block)
        # The block itself was moved to the end of the order above, so it is never its own victim while an older one
        # exists.
        missing_pages = pages[missing]
        while len(missing_pages) * self._page_bytes > self.gpu_free:
            if next(iter(self._lru_blocks), block) == block:  # no other block is left
                break
            self._evict_oldest(moved)
        self._move_what_fits(region, missing_pages, _select(keep, missing), moved)
        if region.gpu_pages[block - region.first_block]:
            self._lru_blocks[block] = region

    def _move_what_fits(
        self, region: MemoryRegion, pages: PageNumbers, keep: PageMask | None, moved: MoveCounts
    ) -> None:
        room = self.gpu_free // self._page_bytes
        self._put_on_gpu(region, pages[:room], _select(keep, slice(room)), moved)
        rest = pages[room:]
        if len(rest):
            moved.unplaced += len(rest)
            fresh = rest[region.state[rest] == 0]
            self._charge_host(len(fresh))
            region.state[fresh] = AT_HOST

    def _put_on_gpu(self, region: MemoryRegion, pages: PageNumbers, keep: PageMask | None, moved: MoveCounts) -> None:
        """Put absent pages on the GPU. The caller has made room."""
        if not len(pages):
            return
        state = region.state[pages]
        moved.to_device += int(np.count_nonzero(state))
        moved.arrived += len(pages)
        region.state[pages] = state | ON_GPU
        self._count_gpu_pages(region, pages, 1)
        self._remove_from_host(region, pages if keep is None else pages[~keep])

    def _evict_oldest(self, moved: MoveCounts) -> None:
        block, region = next(iter(self._lru_blocks.items()))
        where = region.pages_of_block(block - region.first_block)
        state = region.state[where]
        on_gpu = (state & ON_GPU) != 0
        evicted_pages, without_host_copy = int(np.count_nonzero(on_gpu)), int(np.count_nonzero(state == ON_GPU))
        self._charge_host(without_host_copy)
        region.state[where] = np.where(on_gpu, AT_HOST, state)
        region.gpu_pages[block - region.first_block] = 0
        self._charge_gpu(region, -evicted_pages)
        moved.to_host += without_host_copy
        moved.evicted += without_host_copy
        del self._lru_blocks[block]

    def _remove_from_gpu(self, region: MemoryRegion, pages: PageNumbers) -> None:
        leaving = pages[(region.state[pages] & ON_GPU) != 0]
        if not len(leaving):
            return
        region.state[leaving] &= AT_HOST
        self._count_gpu_pages(region, leaving, -1)
        for block in np.unique(leaving // region.block_pages).tolist():
            if not region.gpu_pages[block]:
                self._lru_blocks.pop(region.first_block + block, None)

    def _remove_from_host(self, region: MemoryRegion, pages: PageNumbers) -> None:
        leaving = pages[(region.state[pages] & AT_HOST) != 0]
        region.state[leaving] &= ON_GPU
        self.host_used -= len(leaving) * self._page_bytes

    def _count_gpu_pages(self, region: MemoryRegion, pages: PageNumbers, sign: int) -> None:
        self._charge_gpu(region, sign * len(pages))
        first, last = int(pages[0]) // region.block_pages, int(pages[-1]) // region.block_pages
        if first == last:
            region.gpu_pages[first] += sign * len(pages)
            return
        counts = np.bincount(pages // region.block_pages - first)
        region.gpu_pages[first : last + 1] += (sign * counts).astype(np.int32)

    def _mark_recent(self, region: MemoryRegion, pages: PageNumbers) -> None:
        """Mark the blocks of these pages as most recently used, in order of address."""
        if self._has_fixed_place(region) or not len(pages):
            return
        blocks = pages // region.block_pages + region.first_block
        for block in blocks[run_starts(blocks)].tolist():
            self._lru_blocks[block] = region
            self._lru_blocks.move_to_end(block)

    def _charge_gpu(self, region: MemoryRegion, pages: int) -> None:
        if self._has_fixed_place(region):
            return
        self.gpu_used += pages * self._page_bytes
        if region.kind is MemoryKind.MANAGED:
            self._evictable_bytes += pages * self._page_bytes

    def _charge_host(self, pages: int) -> None:
        nbytes = pages * self._page_bytes
        if self._machine.host_bytes is not None and self.host_used + nbytes > self._machine.host_bytes:
            raise _out_of_memory("the host's memory")
        self.host_used += nbytes


def _select(mask: PageMask | None, where: PageMask | slice) -> PageMask | None:
    return None if mask is None else mask[where]


def _out_of_memory(where: str) -> DriverError:
    name = "CUDA_ERROR_OUT_OF_MEMORY"
    return DriverError(f"placing a page in {where}", name, ERROR_CODES[name])
