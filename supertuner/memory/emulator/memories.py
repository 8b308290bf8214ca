"""The two memories of the software superchip: who takes how much of them, and who must leave when the GPU's is full.

Device memory is taken and never moved. Managed blocks are evicted to the host, least recently used first and whole.
System pages take what is free, evict nobody and stay. On a one-pool machine there is one account and no movement.
Counts stay exact: `gpu_used` is device memory plus, page by page, what is on the GPU.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np

from supertuner.memory.driver import Kind, Refused
from supertuner.memory.emulator.figures import ERROR_CODES, Figures, Parameters
from supertuner.memory.emulator.page_table import AT_HOST, ON_GPU, Mask, Numbers, Region
from supertuner.memory.emulator.sweep import Outcome, Pass, run_starts, sweep

FEW_BLOCKS: Final = 4
"""A pass over so few is quicker one by one."""


@dataclass(slots=True)
class Moved:
    """What one operation sent over the link, in pages, and how many pages came anew to whoever asked."""

    up: int = 0
    down: int = 0
    evicted: int = 0
    arrived: int = 0
    unplaced: int = 0
    """Wanted on the GPU, and left with the host for want of room."""


class Memories:
    def __init__(self, figures: Figures, parameters: Parameters, page_bytes: int) -> None:
        self._figures, self._parameters, self._page_bytes = figures, parameters, page_bytes
        self.gpu_used = 0
        self.host_used = 0
        self.movable_bytes = 0
        """Managed and system memory that exists, populated or not."""
        self._has_copies = False
        """Some page may be on both sides."""
        self._evictable = 0
        """Of `gpu_used`, what managed pages hold."""
        self._recent: OrderedDict[int, Region] = OrderedDict()
        """Managed blocks with a page on the GPU, by their number in the address space; the first goes first."""

    @property
    def gpu_free(self) -> int:
        return self._figures.gpu_bytes - self.gpu_used

    # ── device memory, and memory that is set aside ──────────────────────────────────────────────────────────────

    def reserve(self, nbytes: int, moved: Moved) -> bool:
        """Take GPU memory for good, evicting managed blocks if need be; False, and nothing done, if too little."""
        if nbytes > self.gpu_free + self._evictable:
            return False
        while nbytes > self.gpu_free:
            self._evict_oldest(moved)
        self.gpu_used += nbytes
        return True

    def unreserve(self, nbytes: int) -> None:
        self.gpu_used -= nbytes

    def accept(self, region: Region) -> None:
        """A region whose pages may be on either side now exists."""
        self.movable_bytes += region.pages * self._page_bytes

    def release(self, region: Region) -> None:
        """It ends: all its pages are given back."""
        self.movable_bytes -= region.pages * self._page_bytes
        self.drop(region, np.arange(region.pages, dtype=np.int64))

    # ── pages ────────────────────────────────────────────────────────────────────────────────────────────────────

    def populate_pool(self, region: Region, pages: slice) -> None:
        """One pool: pages come into being in it, for everybody. Beyond it a real machine hangs; this one refuses."""
        missing = region.state[pages] == 0
        nbytes = int(np.count_nonzero(missing)) * self._page_bytes
        if nbytes > self.gpu_free:
            raise _out_of_memory("the pool")
        self.gpu_used += nbytes
        region.state[pages][missing] = AT_HOST

    def bring(self, region: Region, pages: Numbers, duplicate: Mask | None, moved: Moved) -> None:
        """Have these pages on the GPU, in this order; what is there already is used again.

        Those that are `duplicate` keep their copy with the host; None: no page does.
        """
        self._has_copies = self._has_copies or (duplicate is not None and bool(duplicate.any()))
        missing = (region.state[pages] & ON_GPU) == 0
        need = int(np.count_nonzero(missing)) * self._page_bytes
        if region.kind is Kind.SYSTEM:
            self._bring_what_fits(region, pages[missing], moved)
        elif self._set_aside(region) or need <= self.gpu_free:
            self._put_on_gpu(region, pages[missing], _of(duplicate, missing), moved)
            self._refresh(region, pages if self._parameters.hits_refresh else pages[missing])
        elif pages[0] // region.block_pages == pages[-1] // region.block_pages:
            self._bring_block(region, pages, duplicate, moved)
        else:
            self._bring_under_pressure(region, pages, duplicate, moved)

    def used_again(self, region: Region, blocks: slice) -> None:
        """The GPU used blocks of managed memory that it has."""
        if self._parameters.hits_refresh and not self._set_aside(region):
            for block in range(region.first_block + blocks.start, region.first_block + blocks.stop):
                self._recent.move_to_end(block)

    def send_home(self, region: Region, pages: Numbers, duplicate: Mask | None, moved: Moved) -> None:
        """Have these pages with the host; those that are `duplicate` stay on the GPU too."""
        self._has_copies = self._has_copies or (duplicate is not None and bool(duplicate.any()))
        state = region.state[pages]
        absent = (state & AT_HOST) == 0
        self._take_host(int(np.count_nonzero(absent)))
        moved.down += int(np.count_nonzero(absent & (state != 0)))
        moved.arrived += int(np.count_nonzero(absent))
        region.state[pages] |= AT_HOST
        self._leave_gpu(region, pages if duplicate is None else pages[~duplicate])

    def drop(self, region: Region, pages: Numbers) -> None:
        """These pages hold nothing any more, anywhere."""
        if self._figures.one_pool:
            self.gpu_used -= int(np.count_nonzero(region.state[pages])) * self._page_bytes
            region.state[pages] = 0
            return
        self._leave_gpu(region, pages)
        self._leave_host(region, pages)

    def keep_only_on_gpu(self, region: Region, pages: Numbers) -> None:
        """Copies with the host end, for pages that have one on both sides."""
        if self._has_copies:
            self._leave_host(region, pages[region.state[pages] == AT_HOST | ON_GPU])

    def keep_only_at_host(self, region: Region, pages: Numbers) -> None:
        if self._has_copies:
            self._leave_gpu(region, pages[region.state[pages] == AT_HOST | ON_GPU])

    # ── below ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _set_aside(self, region: Region) -> bool:
        """Without concurrent access, managed memory has its place on the GPU from the beginning, and keeps it."""
        return region.kind is Kind.MANAGED and not self._figures.concurrent

    def _bring_under_pressure(self, region: Region, pages: Numbers, duplicate: Mask | None, moved: Moved) -> None:
        """All at once as far as that is exact; block by block where pages have copies or the host is short."""
        todo, done = Pass.over(region, pages), 0
        if len(todo.blocks) > FEW_BLOCKS and not self._has_copies and self._host_holds_all():
            outcome = sweep(self._recent, todo, self.gpu_free // self._page_bytes, self._parameters.hits_refresh)
            self._settle(todo, outcome, moved)
            done = outcome.blocks
        for number in range(done, len(todo.blocks)):
            where = slice(todo.ends[number - 1] if number else 0, todo.ends[number])
            self._bring_block(region, pages[where], _of(duplicate, where), moved)

    def _settle(self, todo: Pass, outcome: Outcome, moved: Moved) -> None:
        """Put the pages where a sweep left their blocks."""
        owners: dict[int, tuple[Region, list[int]]] = {}
        for key, owner in outcome.evicted.items():
            owners.setdefault(id(owner), (owner, []))[1].append(key - owner.first_block)
        for owner, blocks in owners.values():
            pages = owner.pages_of_all(np.array(blocks, np.int64))
            state = owner.state[pages]
            owner.state[pages] = np.where(state & ON_GPU, AT_HOST, state)
            owner.gpu_pages[blocks] = 0
        region, played = todo.region, todo.pages[: todo.ends[outcome.blocks - 1] if outcome.blocks else 0]
        on_gpu = np.zeros(len(region.gpu_pages), np.bool_)  # by block
        settled = [key - region.first_block for key in outcome.settled]
        on_gpu[settled] = True
        region.gpu_pages[settled] = list(outcome.settled.values())
        region.state[played] = np.where(on_gpu[played // region.block_pages], ON_GPU, AT_HOST)
        self._take_gpu(region, self.gpu_free // self._page_bytes - outcome.free)
        self.host_used += (outcome.down - outcome.up) * self._page_bytes
        moved.up += outcome.up
        moved.down += outcome.down
        moved.evicted += outcome.down
        moved.arrived += outcome.arrived

    def _host_holds_all(self) -> bool:
        """Whatever leaves the GPU finds room: nothing can be refused half way."""
        return self._figures.host_bytes is None or self.movable_bytes <= self._figures.host_bytes

    def _bring_block(self, region: Region, pages: Numbers, duplicate: Mask | None, moved: Moved) -> None:
        """Bring pages of one block, evicting older blocks; if there are none left, the rest stays with the host."""
        missing = (region.state[pages] & ON_GPU) == 0
        block = region.first_block + int(pages[0]) // region.block_pages
        if block in self._recent and (self._parameters.hits_refresh or missing.any()):
            self._recent.move_to_end(block)
        wanted, keep = pages[missing], _of(duplicate, missing)
        while len(wanted) * self._page_bytes > self.gpu_free:
            if next(iter(self._recent), block) == block:  # nobody is left but the block itself
                break
            self._evict_oldest(moved)
        room = self.gpu_free // self._page_bytes
        self._put_on_gpu(region, wanted[:room], _of(keep, slice(room)), moved)
        self._leave_with_host(region, wanted[room:], moved)
        if region.gpu_pages[block - region.first_block]:
            self._recent[block] = region

    def _bring_what_fits(self, region: Region, pages: Numbers, moved: Moved) -> None:
        room = self.gpu_free // self._page_bytes
        self._put_on_gpu(region, pages[:room], None, moved)
        self._leave_with_host(region, pages[room:], moved)

    def _put_on_gpu(self, region: Region, pages: Numbers, duplicate: Mask | None, moved: Moved) -> None:
        """Pages that are not on the GPU come there; there is room."""
        if not len(pages):
            return
        state = region.state[pages]
        moved.up += int(np.count_nonzero(state))
        moved.arrived += len(pages)
        region.state[pages] = state | ON_GPU
        self._count(region, pages, 1)
        self._leave_host(region, pages if duplicate is None else pages[~duplicate])

    def _leave_with_host(self, region: Region, pages: Numbers, moved: Moved) -> None:
        if not len(pages):
            return
        moved.unplaced += len(pages)
        fresh = pages[region.state[pages] == 0]
        self._take_host(len(fresh))
        region.state[fresh] = AT_HOST

    def _evict_oldest(self, moved: Moved) -> None:
        block, region = next(iter(self._recent.items()))
        where = region.pages_of(block - region.first_block)
        state = region.state[where]
        on_gpu = (state & ON_GPU) != 0
        gone, homeless = int(np.count_nonzero(on_gpu)), int(np.count_nonzero(state == ON_GPU))
        self._take_host(homeless)
        region.state[where] = np.where(on_gpu, AT_HOST, state)
        region.gpu_pages[block - region.first_block] = 0
        self._take_gpu(region, -gone)
        moved.down += homeless
        moved.evicted += homeless
        del self._recent[block]

    def _leave_gpu(self, region: Region, pages: Numbers) -> None:
        leaving = pages[(region.state[pages] & ON_GPU) != 0]
        if not len(leaving):
            return
        region.state[leaving] &= AT_HOST
        self._count(region, leaving, -1)
        for block in np.unique(leaving // region.block_pages).tolist():
            if not region.gpu_pages[block]:
                self._recent.pop(region.first_block + block, None)

    def _leave_host(self, region: Region, pages: Numbers) -> None:
        leaving = pages[(region.state[pages] & AT_HOST) != 0]
        region.state[leaving] &= ON_GPU
        self.host_used -= len(leaving) * self._page_bytes

    def _count(self, region: Region, pages: Numbers, sign: int) -> None:
        self._take_gpu(region, sign * len(pages))
        first, last = int(pages[0]) // region.block_pages, int(pages[-1]) // region.block_pages
        if first == last:
            region.gpu_pages[first] += sign * len(pages)
            return
        counts = np.bincount(pages // region.block_pages - first)
        region.gpu_pages[first : last + 1] += (sign * counts).astype(np.int32)

    def _refresh(self, region: Region, pages: Numbers) -> None:
        """The blocks of these pages were used last, in the order of their addresses."""
        if self._set_aside(region) or not len(pages):
            return
        blocks = pages // region.block_pages + region.first_block
        for block in blocks[run_starts(blocks)].tolist():
            self._recent[block] = region
            self._recent.move_to_end(block)

    def _take_gpu(self, region: Region, pages: int) -> None:
        if self._set_aside(region):
            return
        self.gpu_used += pages * self._page_bytes
        if region.kind is Kind.MANAGED:
            self._evictable += pages * self._page_bytes

    def _take_host(self, pages: int) -> None:
        nbytes = pages * self._page_bytes
        if self._figures.host_bytes is not None and self.host_used + nbytes > self._figures.host_bytes:
            raise _out_of_memory("the host's memory")
        self.host_used += nbytes


def _of(mask: Mask | None, where: Mask | slice) -> Mask | None:
    return None if mask is None else mask[where]


def _out_of_memory(where: str) -> Refused:
    name = "CUDA_ERROR_OUT_OF_MEMORY"
    return Refused(f"placing a page in {where}", name, ERROR_CODES[name])
