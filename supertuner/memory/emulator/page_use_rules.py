"""Who moves when a page is used: pure functions from the pages' state and advice to what happens to each page.

The rules are CUDA's documentation of cuMemAdvise and of managed memory, and reports of system memory on ATS machines:
managed pages come to the processor that faults on them, unless advice says otherwise and a mapping is possible; system
pages are placed where they are first touched, are read in place over the link, and follow the GPU's access counters.
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
from supertuner.memory.emulator.residency import PageResidency

ACCESSED_BY_HOST = 1
ACCESSED_BY_GPU = 2


@dataclass(frozen=True, slots=True)
class PageUse:
    """What the use of a run of pages does to them, as masks over the run."""

    local: PageMask
    """Used where they are, by the processor they belong to."""
    remote: PageMask
    """Used in place over the link, which counts as an access."""
    arriving: PageMask
    """Must be with the user afterwards: moved, copied or populated there."""
    duplicated: PageMask
    """Of `arrive`, those that keep their copy on the other side."""
    populated_remotely: PageMask
    """Populated on the other side, because they prefer it, and used over the link."""

    def page_counts(self) -> tuple[int, int]:
        """Pages used where they are or arrive, and pages used over the link."""
        local, over_link = self.local | self.arriving, self.remote | self.populated_remotely
        return int(np.count_nonzero(local)), int(np.count_nonzero(over_link))


def gpu_page_use(machine: EmulatedMachine, region: MemoryRegion, pages: slice, write: bool) -> PageUse:
    """The GPU uses pages of managed or system memory on a machine with two memories."""
    state = region.state[pages]
    populated = state != 0
    resident = (state & ON_GPU) != 0
    on_other_side = populated & ~resident
    no_pages = np.zeros_like(resident)
    if region.kind is MemoryKind.SYSTEM:
        prefers_host = region.preferred[pages] < 0
        return PageUse(resident, on_other_side, ~populated & ~prefers_host, no_pages, ~populated & prefers_host)
    if not region.advised:
        return PageUse(resident, no_pages, ~resident, no_pages, no_pages)
    read_duplicated = region.read_mostly[pages] & machine.concurrent
    prefers_host = (region.preferred[pages] < 0) & ~read_duplicated
    mapped = ((region.accessed[pages] & ACCESSED_BY_GPU) != 0) & ~read_duplicated
    remote = on_other_side & (prefers_host | mapped)
    elsewhere = ~populated & prefers_host
    arrive = ~resident & ~remote & ~elsewhere
    return PageUse(resident, remote, arrive, arrive & on_other_side & read_duplicated & (not write), elsewhere)


def host_page_use(machine: EmulatedMachine, region: MemoryRegion, pages: slice, write: bool) -> PageUse:
    """The host uses pages of managed or system memory on a machine with two memories."""
    state = region.state[pages]
    populated = state != 0
    resident = (state & AT_HOST) != 0
    on_other_side = populated & ~resident
    no_pages = np.zeros_like(resident)
    if region.kind is MemoryKind.SYSTEM:  # what went to the GPU is read there, and does not come back
        return PageUse(resident, on_other_side, ~populated, no_pages, no_pages)
    read_duplicated = region.read_mostly[pages] & machine.concurrent
    remote = on_other_side & ~read_duplicated if machine.ats else no_pages
    elsewhere = ~populated & (region.preferred[pages] > 0) if machine.ats else no_pages
    arrive = ~resident & ~remote & ~elsewhere
    return PageUse(resident, remote, arrive, arrive & on_other_side & read_duplicated & (not write), elsewhere)


def set_advice(region: MemoryRegion, pages: slice, advice: MemoryAdvice, location: MemoryLocation) -> None:
    """Note it. No advice moves a page by itself."""
    region.advised = True
    if advice is MemoryAdvice.PREFERRED_LOCATION:
        region.preferred[pages] = location_code(location)
    elif advice is MemoryAdvice.ACCESSED_BY:
        region.accessed[pages] |= _accessor_bit(location)
    else:
        region.read_mostly[pages] = True


def unset_advice(
    memories: PageResidency, region: MemoryRegion, pages: slice, advice: MemoryAdvice, location: MemoryLocation
) -> None:
    """Take it back. The location is ignored but for ACCESSED_BY; without READ_MOSTLY copies become one."""
    if advice is MemoryAdvice.PREFERRED_LOCATION:
        region.preferred[pages] = 0
    elif advice is MemoryAdvice.ACCESSED_BY:
        region.accessed[pages] &= 255 ^ _accessor_bit(location)
    else:
        region.read_mostly[pages] = False
        page_numbers = np.arange(pages.start, pages.stop, dtype=np.int64)
        # Where the copy stays that has no preference is documented as arbitrary; here it is the GPU's.
        memories.keep_only_at_host(region, page_numbers[region.preferred[pages] < 0])
        memories.keep_only_on_gpu(region, page_numbers[region.preferred[pages] >= 0])


def read_common_location(piece: RegionRange, attribute: Literal["preferred", "prefetched"]) -> MemoryLocation | None:
    """The home that all pages of the range have in common."""
    codes = getattr(piece.region, attribute)[piece.region.pages_touching(piece.span)]
    first = int(codes[0])
    return location_from_code(first) if bool((codes == first).all()) else None


def _accessor_bit(location: MemoryLocation) -> int:
    return ACCESSED_BY_GPU if isinstance(location, GpuLocation) else ACCESSED_BY_HOST
