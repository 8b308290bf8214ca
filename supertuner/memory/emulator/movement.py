"""What happens when a processor of the software superchip uses pages, or they are sent somewhere: rules, places, time.

The rules say what a page does, the memories make room for it, the clock says how long it took.
"""

from __future__ import annotations

import numpy as np

from supertuner.memory.driver import Kind
from supertuner.memory.emulator.clock import Clock
from supertuner.memory.emulator.figures import Figures, Parameters
from supertuner.memory.emulator.memories import Memories, Moved
from supertuner.memory.emulator.page_table import AT_HOST, ON_GPU, Numbers, Region
from supertuner.memory.emulator.rules import gpu_use, host_use


class Movement:
    def __init__(
        self, figures: Figures, parameters: Parameters, memories: Memories, clock: Clock, page_bytes: int
    ) -> None:
        self._figures, self._parameters = figures, parameters
        self._memories, self._clock, self._page_bytes = memories, clock, page_bytes

    def reserve(self, nbytes: int) -> bool:
        """Room on the GPU for good; managed memory that must leave for it travels now."""
        moved = Moved()
        enough = self._memories.reserve(nbytes, moved)
        self._clock.wait(self._cross(moved))
        return enough

    def adopt(self, region: Region) -> None:
        """Memory that the process made and filled before anybody told the driver."""
        self._memories.accept(region)
        region.state[:] = AT_HOST
        if not self._figures.one_pool:
            self._memories.host_used += region.pages * self._page_bytes

    def use(self, region: Region, pages: slice, by_gpu: bool, write: bool, accesses: int | None) -> None:
        """A processor uses every page of the run once, in order."""
        count = pages.stop - pages.start
        if region.kind is Kind.DEVICE:
            self._use_device_memory(count, by_gpu, write)
        elif self._figures.one_pool:
            self._memories.populate_pool(region, pages)
            self._use_memory(count, by_gpu, write)
        elif by_gpu:
            self._use_by_gpu(region, pages, write, accesses)
        else:
            self._use_by_host(region, pages, write)

    def prefetch(self, region: Region, pages: slice, to_gpu: bool) -> None:
        """Send the run; the clock does not wait for it."""
        if self._figures.one_pool:
            self._memories.populate_pool(region, pages)
            return
        every, moved = _numbers(pages), Moved()
        copied = region.read_mostly[pages] & (region.state[pages] != 0)
        if to_gpu:
            self._memories.bring(region, every, copied, moved)
        else:
            self._memories.send_home(region, every, copied, moved)
        arrival, blocks = self._cross(moved), region.blocks(pages)
        if moved.arrived:
            region.ready_s[blocks] = np.maximum(region.ready_s[blocks], arrival)

    def _use_by_gpu(self, region: Region, pages: slice, write: bool, accesses: int | None) -> None:
        self._clock.wait(float(region.ready_s[region.blocks(pages)].max()))
        if region.kind is Kind.MANAGED and bool((region.state[pages] == ON_GPU).all()):
            self._memories.used_again(region, region.blocks(pages))
            self._use_memory(pages.stop - pages.start, True, write)
            return
        every, moved = _numbers(pages), Moved()
        if region.kind is Kind.MANAGED and not region.advised:
            self._memories.bring(region, every, None, moved)
            self._charge(len(every), 0, moved, by_gpu=True, write=write)
            return
        use = gpu_use(self._figures, region, pages, write)
        if use.elsewhere.any():
            self._memories.send_home(region, every[use.elsewhere], None, Moved())
        wanted = use.local | use.arrive
        if wanted.any():
            self._memories.bring(region, every[wanted], use.duplicate[wanted], moved)
        if write and region.kind is Kind.MANAGED:
            self._memories.keep_only_on_gpu(region, every)
        self._charge(*use.counts(), moved, by_gpu=True, write=write)
        if use.remote.any():
            self._count_accesses(region, every[use.remote], accesses)

    def _use_by_host(self, region: Region, pages: slice, write: bool) -> None:
        use = host_use(self._figures, region, pages, write)
        self._clock.wait(float(region.ready_s[region.blocks(pages)].max()))
        every, moved = _numbers(pages), Moved()
        if use.elsewhere.any():
            self._memories.bring(region, every[use.elsewhere], None, moved)
        if use.arrive.any():
            self._memories.send_home(region, every[use.arrive], use.duplicate[use.arrive], moved)
        if write and region.kind is Kind.MANAGED:
            self._memories.keep_only_at_host(region, every)
        self._charge(*use.counts(), moved, by_gpu=False, write=write)

    def _count_accesses(self, region: Region, remote: Numbers, accesses: int | None) -> None:
        """Remote accesses fill their block's counter; where it is full, the block's pages follow to the GPU."""
        if not self._figures.ats:
            return
        each = self._page_bytes // self._parameters.access_bytes if accesses is None else accesses
        blocks, counts = np.unique(remote // region.block_pages, return_counts=True)
        region.counters[blocks] += counts * each
        moved = Moved()
        for block in blocks[region.counters[blocks] >= self._parameters.counter_threshold].tolist():
            region.counters[block] = 0
            where = region.pages_of(block)
            follow = (region.state[where] == AT_HOST) & ~(region.preferred[where] < 0)
            if follow.any():
                self._clock.traffic.counter_migrations += 1
                pages = _numbers(where)[follow]
                self._memories.bring(region, pages, None, moved)
        self._clock.wait(self._cross(moved))

    def _charge(self, local: int, over_link: int, moved: Moved, by_gpu: bool, write: bool) -> None:
        """Faults, then the link, then memory itself. Pages that found no room were used over the link."""
        page = self._page_bytes
        self._clock.fault(moved.arrived)
        remote = (over_link + moved.unplaced) * page
        self._clock.traffic.remote_bytes += remote
        towards_gpu = by_gpu != write  # the GPU reads, or the host writes: data flows to the GPU's side
        self._clock.wait(self._cross(moved, remote if towards_gpu else 0, 0 if towards_gpu else remote))
        self._use_memory(local - moved.unplaced, by_gpu, write)

    def _use_device_memory(self, pages: int, by_gpu: bool, write: bool) -> None:
        if by_gpu or self._figures.one_pool:
            self._use_memory(pages, by_gpu, write)
        else:
            nbytes = pages * self._page_bytes
            self._clock.wait(self._clock.cross(nbytes if write else 0, 0 if write else nbytes))

    def _use_memory(self, pages: int, by_gpu: bool, write: bool) -> None:
        if by_gpu:
            self._clock.use_gpu_memory(pages * self._page_bytes, write)
        else:
            self._clock.use_host_memory(pages * self._page_bytes)

    def _cross(self, moved: Moved, up: int = 0, down: int = 0) -> float:
        page = self._page_bytes
        self._clock.traffic.evicted_bytes += moved.evicted * page
        return self._clock.cross(moved.up * page + up, moved.down * page + down)


def _numbers(pages: slice) -> Numbers:
    return np.arange(pages.start, pages.stop, dtype=np.int64)
