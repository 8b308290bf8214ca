"""Uses and migrations of pages on the software superchip, combining the rules, the two memories and the clock.

The rules determine what happens to a page, `PageResidency` makes room for it, the clock charges the time.
"""

from __future__ import annotations

import numpy as np

from supertuner.memory.driver import MemoryKind
from supertuner.memory.emulator.clock import EmulatorClock
from supertuner.memory.emulator.configuration import EmulatedMachine, EmulatorParameters
from supertuner.memory.emulator.page_table import AT_HOST, ON_GPU, MemoryRegion, PageNumbers
from supertuner.memory.emulator.page_use_rules import gpu_page_use, host_page_use
from supertuner.memory.emulator.residency import MoveCounts, PageResidency


class PageMovement:
    def __init__(
        self,
        machine: EmulatedMachine,
        parameters: EmulatorParameters,
        residency: PageResidency,
        clock: EmulatorClock,
        page_bytes: int,
    ) -> None:
        self._machine, self._parameters = machine, parameters
        self._residency, self._clock, self._page_bytes = residency, clock, page_bytes

    def reserve(self, nbytes: int) -> bool:
        """Reserve GPU memory permanently. Managed memory that must be evicted for it is transferred now. False: not
        enough.
        """
        moved = MoveCounts()
        enough = self._residency.reserve(nbytes, moved)
        self._clock.wait_until(self._transfer(moved))
        return enough

    def adopt_foreign_region(self, region: MemoryRegion) -> None:
        """Add memory that the process allocated and filled before the driver saw it: all of it is at the host."""
        self._residency.add_region(region)
        region.state[:] = AT_HOST
        if not self._machine.one_pool:
            self._residency.host_used += region.pages * self._page_bytes

    def use(self, region: MemoryRegion, pages: slice, by_gpu: bool, write: bool, accesses: int | None) -> None:
        """A processor uses every page of the run once, in order. `accesses` per page are counted; None: every cache
        line.
        """
        nbytes, one_pool = (pages.stop - pages.start) * self._page_bytes, self._machine.one_pool
        if region.kind is MemoryKind.DEVICE and not by_gpu and not one_pool:
            self._clock.wait_until(self._clock.transfer(nbytes if write else 0, 0 if write else nbytes))
        elif region.kind is MemoryKind.DEVICE:
            self._clock.use_memory(nbytes, by_gpu, write)
        elif one_pool:
            self._residency.populate_pool(region, pages)
            self._clock.use_memory(nbytes, by_gpu, write)
        elif by_gpu:
            self._use_by_gpu(region, pages, write, accesses)
        else:
            self._use_by_host(region, pages, write)

    def prefetch(self, region: MemoryRegion, pages: slice, to_gpu: bool) -> None:
        """Start migrating the run; the clock does not wait."""
        if self._machine.one_pool:
            self._residency.populate_pool(region, pages)
            return
        page_numbers, moved = _page_numbers(pages), MoveCounts()
        read_duplicated = region.read_mostly[pages] & (region.state[pages] != 0)
        if to_gpu:
            self._residency.move_to_gpu(region, page_numbers, read_duplicated, moved)
        else:
            self._residency.move_to_host(region, page_numbers, read_duplicated, moved)
        arrival, blocks = self._transfer(moved), region.blocks_of(pages)
        if moved.arrived:
            region.ready_s[blocks] = np.maximum(region.ready_s[blocks], arrival)

    def _use_by_gpu(self, region: MemoryRegion, pages: slice, write: bool, accesses: int | None) -> None:
        self._clock.wait_until(float(region.ready_s[region.blocks_of(pages)].max()))
        # Fast paths for the two common cases, which need no masks: everything already on the GPU, and managed memory
        # without advice.
        if region.kind is MemoryKind.MANAGED and bool((region.state[pages] == ON_GPU).all()):
            self._residency.mark_used(region, region.blocks_of(pages))
            self._clock.use_memory((pages.stop - pages.start) * self._page_bytes, True, write)
            return
        page_numbers, moved = _page_numbers(pages), MoveCounts()
        if region.kind is MemoryKind.MANAGED and not region.advised:
            self._residency.move_to_gpu(region, page_numbers, None, moved)
            self._charge_time(len(page_numbers), 0, moved, by_gpu=True, write=write)
            return
        page_use = gpu_page_use(self._machine, region, pages, write)
        if page_use.populated_remotely.any():
            self._residency.move_to_host(region, page_numbers[page_use.populated_remotely], None, MoveCounts())
        on_gpu = page_use.local | page_use.arriving
        if on_gpu.any():
            self._residency.move_to_gpu(region, page_numbers[on_gpu], page_use.duplicated[on_gpu], moved)
        if write and region.kind is MemoryKind.MANAGED:
            self._residency.keep_only_on_gpu(region, page_numbers)
        self._charge_time(*page_use.page_counts(), moved, by_gpu=True, write=write)
        if page_use.remote.any():
            self._count_accesses(region, page_numbers[page_use.remote], accesses)

    def _use_by_host(self, region: MemoryRegion, pages: slice, write: bool) -> None:
        page_use = host_page_use(self._machine, region, pages, write)
        self._clock.wait_until(float(region.ready_s[region.blocks_of(pages)].max()))
        page_numbers, moved = _page_numbers(pages), MoveCounts()
        if page_use.populated_remotely.any():
            self._residency.move_to_gpu(region, page_numbers[page_use.populated_remotely], None, moved)
        arriving = page_use.arriving
        if arriving.any():
            self._residency.move_to_host(region, page_numbers[arriving], page_use.duplicated[arriving], moved)
        if write and region.kind is MemoryKind.MANAGED:
            self._residency.keep_only_at_host(region, page_numbers)
        self._charge_time(*page_use.page_counts(), moved, by_gpu=False, write=write)

    def _count_accesses(self, region: MemoryRegion, remote: PageNumbers, accesses: int | None) -> None:
        """Add remote accesses to their blocks' counters; a block whose counter is full migrates its host pages to the
        GPU.

        Models the access counters of Grace Hopper, which the UVM driver uses with `counter_threshold`. Pages that
        prefer the host do not migrate.
        """
        if not self._machine.ats:
            return
        accesses_per_page = self._page_bytes // self._parameters.access_bytes if accesses is None else accesses
        blocks, counts = np.unique(remote // region.block_pages, return_counts=True)
        region.counters[blocks] += counts * accesses_per_page
        moved = MoveCounts()
        for block in blocks[region.counters[blocks] >= self._parameters.counter_threshold].tolist():
            region.counters[block] = 0
            where = region.pages_of_block(block)
            follow = (region.state[where] == AT_HOST) & ~(region.preferred[where] < 0)
            if follow.any():
                self._clock.traffic.counter_migrations += 1
                self._residency.move_to_gpu(region, _page_numbers(where)[follow], None, moved)
        self._clock.wait_until(self._transfer(moved))

    def _charge_time(self, local: int, over_link: int, moved: MoveCounts, by_gpu: bool, write: bool) -> None:
        """Charge the time of faults, then the link, then memory. Pages that found no room on the GPU were used over the
        link.
        """
        page = self._page_bytes
        self._clock.service_faults(moved.arrived)
        remote = (over_link + moved.unplaced) * page
        self._clock.traffic.remote_bytes += remote
        towards_gpu = by_gpu != write  # if the GPU reads or the host writes, data flows to the GPU
        self._clock.wait_until(self._transfer(moved, remote if towards_gpu else 0, 0 if towards_gpu else remote))
        self._clock.use_memory((local - moved.unplaced) * page, by_gpu, write)

    def _transfer(self, moved: MoveCounts, to_device_bytes: int = 0, to_host_bytes: int = 0) -> float:
        page = self._page_bytes
        self._clock.traffic.evicted_bytes += moved.evicted * page
        return self._clock.transfer(moved.to_device * page + to_device_bytes, moved.to_host * page + to_host_bytes)


def _page_numbers(pages: slice) -> PageNumbers:
    return np.arange(pages.start, pages.stop, dtype=np.int64)
