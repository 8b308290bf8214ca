"""The page table of the software superchip: the location, advice and content of each page of one allocation, as arrays.

Contents need no real memory: a page holds one repeated value, or exact bytes if it was partly written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from supertuner.memory.driver import HOST, AddressRange, GpuLocation, HostNumaLocation, MemoryKind, MemoryLocation

AT_HOST: Final = 1
ON_GPU: Final = 2
"""Bits of a page's state. Neither: not populated. Both: read-duplicated."""
GARBAGE: Final = 0xDB
"""Content of discarded pages, so that a reader of undefined content notices."""

PageMask: TypeAlias = NDArray[np.bool_]
PageNumbers: TypeAlias = NDArray[np.int64]


class PageContents:
    """The bytes of one allocation, stored as one value per page."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._values = np.zeros(pages, np.uint8)
        self._exact_pages: dict[int, bytearray] = {}

    def fill(self, offset: int, nbytes: int, value: int) -> None:
        first, last = -(-offset // self._page_bytes), (offset + nbytes) // self._page_bytes
        if first < last:
            self._values[first:last] = value
            for page in [p for p in self._exact_pages if first <= p < last]:
                del self._exact_pages[page]
        for page, begin, end in self._partial_pages(offset, nbytes):
            self._exact_page(page)[begin:end] = bytes([value]) * (end - begin)

    def read(self, offset: int, nbytes: int) -> bytes:
        first, last = offset // self._page_bytes, -(-(offset + nbytes) // self._page_bytes)
        page_bytes = np.repeat(self._values[first:last], self._page_bytes)
        for page in range(first, last) if len(self._exact_pages) > last - first else sorted(self._exact_pages):
            if first <= page < last and page in self._exact_pages:
                at = (page - first) * self._page_bytes
                page_bytes[at : at + self._page_bytes] = np.frombuffer(self._exact_pages[page], np.uint8)
        begin = offset - first * self._page_bytes
        return page_bytes[begin : begin + nbytes].tobytes()

    def write(self, offset: int, content: bytes) -> None:
        """Write bytes; a page of one repeated value is stored as that value."""
        size, end = self._page_bytes, offset + len(content)
        for page in range(offset // size, -(-end // size)):
            begin, stop = max(offset, page * size), min(end, (page + 1) * size)
            part = content[begin - offset : stop - offset]
            if len(part) == size and part.count(part[:1]) == size:
                self.fill(page * size, size, part[0])
            else:
                self._exact_page(page)[begin - page * size : stop - page * size] = part

    def copy_from(self, source: PageContents, target_offset: int, source_offset: int, nbytes: int) -> None:
        """Copy page by page if both ranges have the same offset within a page, otherwise in small pieces."""
        size = self._page_bytes
        # Three parts: the partial page before the first page boundary, whole pages (only if source and target are
        # equally aligned), and the rest. Whole pages copy one value per page and the few exact pages; the edges go
        # through real bytes, 64 pages at a time to bound the temporary memory.
        lead = min(-source_offset % size, nbytes)
        whole_bytes = (nbytes - lead) // size * size if (source_offset - target_offset) % size == 0 else 0
        edges = [(0, lead), (lead + whole_bytes, nbytes)] if whole_bytes else [(0, nbytes)]
        if whole_bytes:
            target_page, source_page = (target_offset + lead) // size, (source_offset + lead) // size
            count = whole_bytes // size
            copied = {p: bytes(b) for p, b in source._exact_pages.items() if 0 <= p - source_page < count}
            self.fill(target_page * size, whole_bytes, 0)  # drops exact pages in the target
            self._values[target_page : target_page + count] = source._values[source_page : source_page + count]
            self._exact_pages.update({p - source_page + target_page: bytearray(b) for p, b in copied.items()})
        for begin, end in edges:
            for offset in range(begin, end, 64 * size):
                piece = source.read(source_offset + offset, min(64 * size, end - offset))
                self.write(target_offset + offset, piece)

    def _partial_pages(self, offset: int, nbytes: int) -> list[tuple[int, int, int]]:
        """The pages that a range covers only partly, with the covered range inside each."""
        size, end = self._page_bytes, offset + nbytes
        edges = {offset // size, (end - 1) // size}
        pieces = [(p, max(offset - p * size, 0), min(end - p * size, size)) for p in sorted(edges)]
        return [piece for piece in pieces if piece[2] - piece[1] < size]

    def _exact_page(self, page: int) -> bytearray:
        if page not in self._exact_pages:
            self._exact_pages[page] = bytearray([int(self._values[page])]) * self._page_bytes
        return self._exact_pages[page]


class MemoryRegion:
    """One allocation, or one block of memory that the process allocated elsewhere."""

    def __init__(self, kind: MemoryKind, span: AddressRange, page_bytes: int, block_bytes: int) -> None:
        self.kind, self.span = kind, span
        self.page_bytes = page_bytes
        self.pages = -(-span.nbytes // page_bytes)
        self.block_pages = block_bytes // page_bytes
        self.first_block = span.address // block_bytes
        """Number of its first block in the address space, which identifies its blocks uniquely among all regions."""
        blocks = -(-self.pages // self.block_pages)
        self.state = np.zeros(self.pages, np.uint8)
        self.preferred = np.zeros(self.pages, np.int16)
        self.prefetched = np.zeros(self.pages, np.int16)
        self.accessed = np.zeros(self.pages, np.uint8)
        self.read_mostly = np.zeros(self.pages, np.bool_)
        self.advised = False
        """Whether any advice was ever set; if not, the arrays above need not be read."""
        self.gpu_pages = np.zeros(blocks, np.int32)
        self.counters = np.zeros(blocks, np.int64)
        self.ready_s = np.zeros(blocks, np.float64)
        """Modelled time at which the last prefetch of each block arrives."""
        self.contents = PageContents(self.pages, page_bytes)

    def blocks_of(self, pages: slice) -> slice:
        return slice(pages.start // self.block_pages, -(-pages.stop // self.block_pages))

    def pages_of_blocks(self, blocks: PageNumbers) -> PageNumbers:
        pages: PageNumbers = (blocks[:, None] * self.block_pages + np.arange(self.block_pages)).ravel()
        return pages[pages < self.pages]

    def pages_of_block(self, block: int) -> slice:
        return slice(block * self.block_pages, min((block + 1) * self.block_pages, self.pages))


@dataclass(frozen=True, slots=True)
class RegionRange:
    """The part of a request inside one region."""

    region: MemoryRegion
    span: AddressRange

    @property
    def offset(self) -> int:
        return self.span.address - self.region.span.address

    @property
    def pages(self) -> slice:
        """The pages that the range touches, rounded outward, as the driver documents for hints."""
        size = self.region.page_bytes
        return slice(self.offset // size, -(-(self.offset + self.span.nbytes) // size))

    @property
    def whole_pages(self) -> slice:
        """The pages completely inside the range. The end of the allocation completes its last page."""
        size, end = self.region.page_bytes, self.offset + self.span.nbytes
        first, last = -(-self.offset // size), self.region.pages if end == self.region.span.nbytes else end // size
        return slice(first, max(first, last))


def location_code(location: MemoryLocation) -> int:
    """A location as a small number; 0 means none."""
    if isinstance(location, GpuLocation):
        return location.device + 1
    return -2 - location.node if isinstance(location, HostNumaLocation) else -1


def location_from_code(code: int) -> MemoryLocation | None:
    if code == 0:
        return None
    if code > 0:
        return GpuLocation(code - 1)
    return HOST if code == -1 else HostNumaLocation(-2 - code)
