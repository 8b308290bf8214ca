"""Advice on pages of the software superchip: set, taken back, and read back for a whole range or not at all."""

from __future__ import annotations

from typing import Literal

import numpy as np

from supertuner.memory.driver import Advice, Gpu, Home
from supertuner.memory.emulator.memories import Memories
from supertuner.memory.emulator.page_table import Piece, Region, code_of, home_of
from supertuner.memory.emulator.rules import ACCESSED_BY_GPU, ACCESSED_BY_HOST


def advise(region: Region, pages: slice, advice: Advice, home: Home) -> None:
    """Note it. No advice moves a page by itself."""
    region.advised = True
    if advice is Advice.PREFERRED_LOCATION:
        region.preferred[pages] = code_of(home)
    elif advice is Advice.ACCESSED_BY:
        region.accessed[pages] |= _bit(home)
    else:
        region.read_mostly[pages] = True


def unadvise(memories: Memories, region: Region, pages: slice, advice: Advice, home: Home) -> None:
    """Take it back. The location is ignored but for ACCESSED_BY; without READ_MOSTLY copies become one."""
    if advice is Advice.PREFERRED_LOCATION:
        region.preferred[pages] = 0
    elif advice is Advice.ACCESSED_BY:
        region.accessed[pages] &= 255 ^ _bit(home)
    else:
        region.read_mostly[pages] = False
        every = np.arange(pages.start, pages.stop, dtype=np.int64)
        # Where the copy stays that has no preference is documented as arbitrary; here it is the GPU's.
        memories.keep_only_at_host(region, every[region.preferred[pages] < 0])
        memories.keep_only_on_gpu(region, every[region.preferred[pages] >= 0])


def read_back(piece: Piece, what: Literal["preferred", "prefetched"]) -> Home | None:
    """The home that all pages of the range have in common."""
    codes = getattr(piece.region, what)[piece.region.covered(piece.span)]
    first = int(codes[0])
    return home_of(first) if bool((codes == first).all()) else None


def _bit(home: Home) -> int:
    return ACCESSED_BY_GPU if isinstance(home, Gpu) else ACCESSED_BY_HOST
