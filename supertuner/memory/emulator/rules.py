"""Who moves when a page is used: pure functions from the pages' state and advice to what happens to each page.

The rules are CUDA's documentation of cuMemAdvise and of managed memory, and reports of system memory on ATS machines:
managed pages come to the processor that faults on them, unless advice says otherwise and a mapping is possible; system
pages are placed where they are first touched, are read in place over the link, and follow the GPU's access counters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from supertuner.memory.driver import Kind
from supertuner.memory.emulator.figures import Figures
from supertuner.memory.emulator.page_table import AT_HOST, ON_GPU, Mask, Region

ACCESSED_BY_HOST = 1
ACCESSED_BY_GPU = 2


@dataclass(frozen=True, slots=True)
class Use:
    """What the use of a run of pages does to them, as masks over the run."""

    local: Mask
    """Used where they are, by the processor they belong to."""
    remote: Mask
    """Used in place over the link, which counts as an access."""
    arrive: Mask
    """Must be with the user afterwards: moved, copied or populated there."""
    duplicate: Mask
    """Of `arrive`, those that keep their copy on the other side."""
    elsewhere: Mask
    """Populated on the other side, because they prefer it, and used over the link."""

    def counts(self) -> tuple[int, int]:
        """Pages used where they are or arrive, and pages used over the link."""
        local, over_link = self.local | self.arrive, self.remote | self.elsewhere
        return int(np.count_nonzero(local)), int(np.count_nonzero(over_link))


def gpu_use(figures: Figures, region: Region, pages: slice, write: bool) -> Use:
    """The GPU uses pages of managed or system memory on a machine with two memories."""
    state = region.state[pages]
    populated = state != 0
    here = (state & ON_GPU) != 0
    away = populated & ~here
    nothing = np.zeros_like(here)
    if region.kind is Kind.SYSTEM:
        prefers_host = region.preferred[pages] < 0
        return Use(here, away, ~populated & ~prefers_host, nothing, ~populated & prefers_host)
    if not region.advised:
        return Use(here, nothing, ~here, nothing, nothing)
    copied = region.read_mostly[pages] & figures.concurrent
    prefers_host = (region.preferred[pages] < 0) & ~copied
    mapped = ((region.accessed[pages] & ACCESSED_BY_GPU) != 0) & ~copied
    remote = away & (prefers_host | mapped)
    elsewhere = ~populated & prefers_host
    arrive = ~here & ~remote & ~elsewhere
    return Use(here, remote, arrive, arrive & away & copied & (not write), elsewhere)


def host_use(figures: Figures, region: Region, pages: slice, write: bool) -> Use:
    """The host uses pages of managed or system memory on a machine with two memories."""
    state = region.state[pages]
    populated = state != 0
    here = (state & AT_HOST) != 0
    away = populated & ~here
    nothing = np.zeros_like(here)
    if region.kind is Kind.SYSTEM:  # what went to the GPU is read there, and does not come back
        return Use(here, away, ~populated, nothing, nothing)
    copied = region.read_mostly[pages] & figures.concurrent
    remote = away & ~copied if figures.ats else nothing
    elsewhere = ~populated & (region.preferred[pages] > 0) if figures.ats else nothing
    arrive = ~here & ~remote & ~elsewhere
    return Use(here, remote, arrive, arrive & away & copied & (not write), elsewhere)
