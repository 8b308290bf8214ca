"""Who moves when a page is used: pure functions from the pages' state and advice to what happens to each page.

The rules are CUDA's documentation of cuMemAdvise and of managed memory, and reports of system memory on ATS machines:
managed pages come to the processor that faults on them, unless advice says otherwise and a mapping is possible; system
pages are placed where they are first touched, are read in place over the link, and follow the GPU's access counters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from supertuner.memory.driver import MemoryKind
from supertuner.memory.emulator.configuration import EmulatedMachine
from supertuner.memory.emulator.page_table import AT_HOST, ON_GPU, MemoryRegion, PageMask

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
