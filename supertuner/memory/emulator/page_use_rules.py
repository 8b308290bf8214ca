"""Rules for the use of a page: from its state and advice to what happens to it; and how advice is set and read back.

The rules follow CUDA's documentation of cuMemAdvise and of managed memory, and reports about system memory on ATS
machines: a managed page migrates to the processor that faults on it, unless advice says otherwise and it can be mapped;
a system page is placed where it is first touched, is read in place over the link, and follows the GPU's access
counters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from supertuner.memory.driver import GpuLocation, MemoryAdvice, MemoryKind, MemoryLocation
from supertuner.memory.emulator.configuration import EmulatedMachine
from supertuner.memory.emulator.page_table import (
    AT_HOST,
    ON_GPU,
    MemoryRegion,
    PageMask,
    RegionRange,
    location_code,
    location_from_code,
)

ACCESSED_BY_HOST = 1
ACCESSED_BY_GPU = 2


@dataclass(frozen=True, slots=True)
class PageUse:
    """What using a run of pages does to each of them, as masks over the run."""

    local: PageMask
    """Used in the memory of the processor that uses them."""
    remote: PageMask
    """Used in place over the link, which counts as a remote access."""
    arriving: PageMask
    """Must be in the user's memory afterwards: migrated, copied or populated there."""
    duplicated: PageMask
    """Of `arriving`, those that keep their copy on the other side."""
    populated_remotely: PageMask
    """Populated on the other side because that is their preferred location, and used over the link."""

    def page_counts(self) -> tuple[int, int]:
        """(pages used locally or arriving, pages used over the link)."""
        local, over_link = self.local | self.arriving, self.remote | self.populated_remotely
        return int(np.count_nonzero(local)), int(np.count_nonzero(over_link))


def gpu_page_use(machine: EmulatedMachine, region: MemoryRegion, pages: slice, write: bool) -> PageUse:
    """The effect of the GPU using managed or system pages, on a machine with two memories."""
    populated, resident = region.state[pages] != 0, (region.state[pages] & ON_GPU) != 0
    on_other_side, no_pages = populated & ~resident, np.zeros_like(resident)
    if region.kind is MemoryKind.SYSTEM:
        # First touch places an unpopulated page on the GPU unless it prefers the host. A page at the host is read in
        # place over the link (ATS) until its access counter reaches the threshold (`PageMovement._count_accesses`).
        prefers_host = region.preferred[pages] < 0
        return PageUse(resident, on_other_side, ~populated & ~prefers_host, no_pages, ~populated & prefers_host)
    if not region.advised:
        # Without advice every absent managed page faults and migrates.
        return PageUse(resident, no_pages, ~resident, no_pages, no_pages)
    read_duplicated = region.read_mostly[pages] & machine.concurrent
    # cuMemAdvise: a faulting processor maps a page at its preferred location, or one that is advised ACCESSED_BY,
    # instead of migrating it. READ_MOSTLY takes precedence: reads duplicate the page, and a write reduces it to one
    # copy (`keep_only_on_gpu`).
    prefers_host = (region.preferred[pages] < 0) & ~read_duplicated
    mapped = ((region.accessed[pages] & ACCESSED_BY_GPU) != 0) & ~read_duplicated
    remote = on_other_side & (prefers_host | mapped)
    elsewhere = ~populated & prefers_host
    arrive = ~resident & ~remote & ~elsewhere
    return PageUse(resident, remote, arrive, arrive & on_other_side & read_duplicated & (not write), elsewhere)


def host_page_use(machine: EmulatedMachine, region: MemoryRegion, pages: slice, write: bool) -> PageUse:
    """The effect of the host using managed or system pages, on a machine with two memories."""
    populated, resident = region.state[pages] != 0, (region.state[pages] & AT_HOST) != 0
    on_other_side, no_pages = populated & ~resident, np.zeros_like(resident)
    if region.kind is MemoryKind.SYSTEM:  # pages on the GPU are read there, and do not come back
        return PageUse(resident, on_other_side, ~populated, no_pages, no_pages)
    read_duplicated = region.read_mostly[pages] & machine.concurrent
    # With ATS the CPU accesses GPU memory in place; without it the page must migrate to the host.
    remote = on_other_side & ~read_duplicated if machine.ats else no_pages
    elsewhere = ~populated & (region.preferred[pages] > 0) if machine.ats else no_pages
    arrive = ~resident & ~remote & ~elsewhere
    return PageUse(resident, remote, arrive, arrive & on_other_side & read_duplicated & (not write), elsewhere)


def set_advice(region: MemoryRegion, pages: slice, advice: MemoryAdvice, location: MemoryLocation) -> None:
    """Record the advice. No advice moves a page by itself."""
    region.advised = True
    if advice is MemoryAdvice.PREFERRED_LOCATION:
        region.preferred[pages] = location_code(location)
    elif advice is MemoryAdvice.ACCESSED_BY:
        region.accessed[pages] |= ACCESSED_BY_GPU if isinstance(location, GpuLocation) else ACCESSED_BY_HOST
    else:
        region.read_mostly[pages] = True


def read_common_location(piece: RegionRange, attribute: Literal["preferred", "prefetched"]) -> MemoryLocation | None:
    """The location that all pages of the range have in common, or None."""
    codes = getattr(piece.region, attribute)[piece.pages]
    first = int(codes[0])
    return location_from_code(first) if bool((codes == first).all()) else None
