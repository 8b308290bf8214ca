"""Advice on pages of the software superchip: set, taken back, and read back for a whole range or not at all."""

from __future__ import annotations

from typing import Literal

import numpy as np

from supertuner.memory.driver import GpuLocation, MemoryAdvice, MemoryLocation
from supertuner.memory.emulator.page_table import MemoryRegion, RegionRange, location_code, location_from_code
from supertuner.memory.emulator.page_use_rules import ACCESSED_BY_GPU, ACCESSED_BY_HOST
from supertuner.memory.emulator.residency import PageResidency


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
