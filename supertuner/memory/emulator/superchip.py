"""A software superchip: a driver whose GPU is arithmetic, for tests without one and for plans of a machine's work.

Modelled: pages and 2 MiB blocks; the GPU's and the host's memory, or one pool; a link with a bandwidth each way; device
memory, which never moves; managed memory, moved by faults, prefetches, advice and least-recently-used eviction; system
memory on ATS machines, which follows the GPU's access counters and does not come back; discards; faults of the driver.
Time is modelled (`seconds`), from the machine's figures and from `Parameters`, of which the cost of a batch of faults,
the bytes of a counted access, duplex traffic and whether hits refresh eviction order are unconfirmed. Nothing is
measured. One GPU; one host node; one stream of work and any number of copies beside it; kernels, peers and HMM are not
modelled. See docs/model.md.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import numpy as np

from supertuner.memory.driver import HOST, Advice, Device, Gpu, Home, HostNode, Kind, Refused, Span
from supertuner.memory.emulator.advice import advise, read_back, unadvise
from supertuner.memory.emulator.clock import Clock, Traffic
from supertuner.memory.emulator.figures import ERROR_CODES, Fault, Faults, Figures, Parameters
from supertuner.memory.emulator.memories import Memories
from supertuner.memory.emulator.movement import Movement
from supertuner.memory.emulator.page_table import AT_HOST, GARBAGE, ON_GPU, Piece, Region, code_of
from supertuner.memory.machines import Machine

CUDA_13: Final = 13000
HOST_NODE: Final = 0
GPU_NODE: Final = 1
_FIRST_ADDRESS: Final = 1 << 44
"""Far from where a process has its own memory, which begins well above or well below."""


class Superchip:
    """The seam's verbs over a modelled machine. May be called from any thread."""

    def __init__(
        self,
        machine: Machine | Figures,
        *,
        page_bytes: int = 65536,
        faults: Faults = Faults(),  # noqa: B008 - frozen
        parameters: Parameters = Parameters(),  # noqa: B008 - frozen
    ) -> None:
        self.figures = machine if isinstance(machine, Figures) else Figures.of(machine)
        assert self.figures.block_bytes % page_bytes == 0, "a block holds whole pages"
        self.page_bytes = page_bytes
        self.clock = Clock(self.figures, parameters)
        self._memories = Memories(self.figures, parameters, page_bytes)
        self._movement = Movement(self.figures, parameters, self._memories, self.clock, page_bytes)
        self._faults = list(faults.plan)
        self._calls: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._next_address = _FIRST_ADDRESS
        self._starts: list[int] = []
        self._regions: dict[int, Region] = {}
        self._foreign: dict[int, Region] = {}
        """System memory that this driver did not allocate, block by block, from the first time it was named."""

    # ── what the model can tell beyond the seam ──────────────────────────────────────────────────────────────────

    @property
    def seconds(self) -> float | None:
        """Modelled time; None once a cost was met whose figure is not known (`clock.unknown` names it)."""
        return self.clock.seconds

    @property
    def traffic(self) -> Traffic:
        return self.clock.traffic

    def compute(self, seconds: float) -> None:
        """The GPU is busy with something else; prefetches that are under way go on."""
        with self._lock:
            self.clock.spend(seconds)

    def stream(self, nbytes: int, to_gpu: bool, after: float = 0.0) -> float:
        """A copy between device memory and pinned host memory, on a stream of its own and not begun before `after`: the
        modelled second in which it will have arrived. Copies take the link in the order in which they are asked for."""
        with self._lock:
            return self.clock.cross(nbytes if to_gpu else 0, 0 if to_gpu else nbytes, after)

    def wait(self, until: float) -> None:
        """The GPU's own stream waits for an event of another."""
        with self._lock:
            self.clock.wait(until)

    def inject(self, fault: Fault) -> None:
        """A further fault; its `first` call counts from now."""
        with self._lock:
            self._faults.append(replace(fault, first=self._calls[fault.verb] + fault.first))

    def touch(self, span: Span, by: Home, write: bool = False, accesses: int | None = None) -> None:
        """A processor uses every page of the range once. `accesses` counted a page; None: every cache line."""
        with self._verb("touch"):
            for piece in self._pieces("touch", span):
                self._movement.use(piece.region, piece.region.covered(piece.span), isinstance(by, Gpu), write, accesses)

    def resident(self, span: Span) -> dict[Home | None, int]:
        """How many pages of the range are where; None: nowhere yet. A page with a copy on each side counts twice."""
        found: dict[Home | None, int] = {}
        with self._lock:
            for piece in self._pieces("resident", span):
                pages = piece.region.covered(piece.span)
                state = piece.region.state[pages]
                if piece.region.kind is Kind.DEVICE:
                    state = np.full_like(state, ON_GPU)
                for home, there in ((HOST, state & AT_HOST), (Gpu(0), state & ON_GPU), (None, state == 0)):
                    found[home] = found.get(home, 0) + int(np.count_nonzero(there))
        return {home: count for home, count in found.items() if count}

    # ── the seam ─────────────────────────────────────────────────────────────────────────────────────────────────

    def version(self) -> int:
        return self.figures.version

    def devices(self) -> tuple[Device, ...]:
        figures = self.figures
        return (
            Device(
                number=0,
                name=figures.name,
                total_bytes=figures.gpu_bytes,
                managed=figures.managed,
                concurrent_managed=figures.managed and figures.concurrent,
                pageable=figures.reaches_host,
                host_page_tables=figures.ats,
                direct_host_access=figures.reaches_host,
                integrated=figures.one_pool,
                numa_node=GPU_NODE if figures.ats and not figures.one_pool else None,
                host_node=HOST_NODE,
            ),
        )

    def free_bytes(self, device: int) -> int:
        with self._verb("free_bytes"):
            self._check_device("free_bytes", device)
            return self._memories.gpu_free

    def allocate(self, kind: Kind, nbytes: int, device: int = 0) -> int:
        with self._verb("allocate"):
            self._check_device("allocate", device)
            if nbytes <= 0 or kind is Kind.PINNED:
                raise refusal("allocate", "CUDA_ERROR_INVALID_VALUE")
            if kind is Kind.MANAGED and not self.figures.managed:
                raise refusal("allocate", "CUDA_ERROR_NOT_SUPPORTED")
            if self._takes_place_at_once(kind) and not self._movement.reserve(self._whole_pages(nbytes)):
                raise refusal("allocate", "CUDA_ERROR_OUT_OF_MEMORY")
            span = Span(self._next_address, nbytes)
            block = self.figures.block_bytes
            self._next_address += -(-nbytes // block) * block + block  # a gap: no range runs from one into the next
            self._starts.append(span.address)
            region = self._regions[span.address] = Region(kind, span, self.page_bytes, block)
            if kind is not Kind.DEVICE:
                self._memories.accept(region)
            return span.address

    def free(self, address: int) -> None:
        with self._verb("free"):
            region = self._regions.pop(address, None)
            if region is None:
                raise refusal("free", "CUDA_ERROR_INVALID_VALUE")
            del self._starts[bisect_right(self._starts, address) - 1]
            if region.kind is not Kind.DEVICE:
                self._memories.release(region)
            if self._takes_place_at_once(region.kind):
                self._memories.unreserve(self._whole_pages(region.span.nbytes))

    def kind_of(self, address: int) -> Kind:
        with self._verb("kind_of"):
            region = self._region_at(address)
            return Kind.SYSTEM if region is None else region.kind

    def advise(self, span: Span, advice: Advice, home: Home) -> None:
        with self._verb("advise"):
            for piece in self._advised("advise", span, advice, home):
                advise(piece.region, piece.region.covered(piece.span), advice, home)

    def unadvise(self, span: Span, advice: Advice, home: Home) -> None:
        with self._verb("unadvise"):
            for piece in self._advised("unadvise", span, advice, home):
                unadvise(self._memories, piece.region, piece.region.covered(piece.span), advice, home)

    def prefetch(self, spans: Sequence[Span], home: Home) -> None:
        with self._verb("prefetch"):
            self._check_moves("prefetch")
            self._check_home("prefetch", home)
            pieces = [piece for span in spans for piece in self._pageable("prefetch", span)]
            for piece in pieces:
                pages = piece.region.covered(piece.span)
                piece.region.prefetched[pages] = code_of(home)
                self._movement.prefetch(piece.region, pages, isinstance(home, Gpu))

    def discard(self, spans: Sequence[Span]) -> None:
        with self._verb("discard"):
            if self.figures.version < CUDA_13:
                raise refusal("discard", "CUDA_ERROR_NOT_SUPPORTED")
            self._check_moves("discard")
            pieces = [piece for span in spans for piece in self._pieces("discard", span)]
            if any(piece.region.kind is not Kind.MANAGED for piece in pieces):
                raise refusal("discard", "CUDA_ERROR_INVALID_VALUE")
            for piece in pieces:  # a page that is only partly worthless is not
                pages = piece.region.inside(piece.span)
                self._memories.drop(piece.region, np.arange(pages.start, pages.stop, dtype=np.int64))
                size = self.page_bytes
                piece.region.contents.fill(pages.start * size, (pages.stop - pages.start) * size, GARBAGE)

    def preferred(self, span: Span) -> Home | None:
        with self._verb("preferred"):
            return read_back(self._managed("preferred", span), "preferred")

    def last_prefetch(self, span: Span) -> Home | None:
        with self._verb("last_prefetch"):
            return read_back(self._managed("last_prefetch", span), "prefetched")

    def accessed_by(self, span: Span) -> tuple[Home, ...]:
        with self._verb("accessed_by"):
            piece = self._managed("accessed_by", span)
            both = int(np.bitwise_and.reduce(piece.region.accessed[piece.region.covered(piece.span)]))
            return tuple(home for bit, home in ((2, Gpu(0)), (1, HOST)) if both & bit)

    def read_mostly(self, span: Span) -> bool:
        with self._verb("read_mostly"):
            piece = self._managed("read_mostly", span)
            return bool(piece.region.read_mostly[piece.region.covered(piece.span)].all())

    def locate(self, addresses: Sequence[int]) -> list[int | None]:
        """Of system memory. What the kernel says of managed memory on a superchip is not known, so it is not told."""
        with self._verb("locate"):
            return [self._node(address) for address in addresses]

    def fill(self, span: Span, value: int, device: int = 0) -> None:
        with self._verb("fill"):
            self._check_device("fill", device)
            piece = self._known("fill", span)
            if piece.region.kind is Kind.SYSTEM and not self.figures.reaches_host:
                raise refusal("fill", "CUDA_ERROR_INVALID_VALUE")
            self._movement.use(piece.region, piece.region.covered(span), True, True, None)
            piece.region.contents.fill(span.address - piece.region.span.address, span.nbytes, value)

    def copy(self, target: int, source: int, nbytes: int, device: int = 0) -> None:
        with self._verb("copy"):
            self._check_device("copy", device)
            origin, goal = (self._known("copy", Span(a, nbytes)) for a in (source, target))
            for piece, write in ((origin, False), (goal, True)):
                by_gpu = piece.region.kind is not Kind.SYSTEM or self.figures.reaches_host
                self._movement.use(piece.region, piece.region.covered(piece.span), by_gpu, write, None)
            goal.region.contents.copy_from(
                origin.region.contents, target - goal.region.span.address, source - origin.region.span.address, nbytes
            )

    def read(self, span: Span) -> bytes:
        with self._verb("read"):
            piece = self._known("read", span)
            self._movement.use(piece.region, piece.region.covered(span), False, False, None)
            return piece.region.contents.read(span.address - piece.region.span.address, span.nbytes)

    def synchronize(self, device: int = 0) -> None:
        with self._verb("synchronize"):
            self._check_device("synchronize", device)
            self.clock.drain()

    # ── what may be asked ────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _verb(self, name: str) -> Iterator[None]:
        """One call at a time, and its faults before anything is done."""
        with self._lock:
            self._calls[name] += 1
            for fault in self._faults:
                if fault.verb == name and fault.strikes(self._calls[name]):
                    raise refusal(name, fault.name)
            yield

    def _takes_place_at_once(self, kind: Kind) -> bool:
        """Without concurrent access, managed memory has its place on the GPU from the start, as device memory has."""
        return kind is Kind.DEVICE or (kind is Kind.MANAGED and not self.figures.concurrent)

    def _whole_pages(self, nbytes: int) -> int:
        return -(-nbytes // self.page_bytes) * self.page_bytes

    def _check_device(self, verb: str, device: int) -> None:
        if device != 0:
            raise refusal(verb, "CUDA_ERROR_INVALID_DEVICE")

    def _check_home(self, verb: str, home: Home) -> None:
        if isinstance(home, Gpu):
            self._check_device(verb, home.device)
        elif isinstance(home, HostNode) and home.node != HOST_NODE:
            raise refusal(verb, "CUDA_ERROR_INVALID_VALUE")

    def _check_moves(self, verb: str) -> None:
        if not (self.figures.managed and self.figures.concurrent):
            raise refusal(verb, "CUDA_ERROR_INVALID_DEVICE")

    def _advised(self, verb: str, span: Span, advice: Advice, home: Home) -> list[Piece]:
        """The pieces that take this advice: none where it is documented to have no effect."""
        self._check_home(verb, home)
        if isinstance(home, HostNode) and advice is Advice.ACCESSED_BY:
            raise refusal(verb, "CUDA_ERROR_INVALID_VALUE")
        if isinstance(home, Gpu) and advice is not Advice.READ_MOSTLY:
            self._check_moves(verb)
        pieces = self._pageable(verb, span)
        located = advice is Advice.PREFERRED_LOCATION or not self.figures.ats
        return [piece for piece in pieces if piece.region.kind is Kind.MANAGED or located]

    def _pageable(self, verb: str, span: Span) -> list[Piece]:
        """A range of managed memory, or of system memory where the GPU reads it."""
        pieces = self._pieces(verb, span)
        for piece in pieces:
            kind = piece.region.kind
            if kind is Kind.DEVICE or (kind is Kind.SYSTEM and not self.figures.reaches_host):
                raise refusal(verb, "CUDA_ERROR_INVALID_VALUE")
        return pieces

    def _managed(self, verb: str, span: Span) -> Piece:
        """What can be read back: the documentation promises it for managed memory only."""
        piece = self._known(verb, span)
        if piece.region.kind is not Kind.MANAGED:
            raise refusal(verb, "CUDA_ERROR_INVALID_VALUE")
        return piece

    def _known(self, verb: str, span: Span) -> Piece:
        """A range inside one allocation of this driver."""
        region = self._region_at(span.address)
        if span.nbytes <= 0 or region is None or span.end > region.span.end:
            raise refusal(verb, "CUDA_ERROR_INVALID_VALUE")
        return Piece(region, span)

    def _pieces(self, verb: str, span: Span) -> list[Piece]:
        """A range inside one allocation; or, where the GPU reads it, memory that the process has from elsewhere."""
        ours = span.address < self._next_address and span.end > _FIRST_ADDRESS
        if ours or span.nbytes <= 0 or not self.figures.reaches_host:
            return [self._known(verb, span)]
        block, pieces = self.figures.block_bytes, []
        for start in range(span.address // block * block, span.end, block):
            if start not in self._foreign:
                self._foreign[start] = Region(Kind.SYSTEM, Span(start, block), self.page_bytes, block)
                self._movement.adopt(self._foreign[start])
            begin, end = max(start, span.address), min(start + block, span.end)
            pieces.append(Piece(self._foreign[start], Span(begin, end - begin)))
        return pieces

    def _region_at(self, address: int) -> Region | None:
        number = bisect_right(self._starts, address) - 1
        if number < 0:
            return None
        region = self._regions[self._starts[number]]
        return region if address < region.span.end else None

    def _node(self, address: int) -> int | None:
        region = self._region_at(address) or self._foreign.get(
            address // self.figures.block_bytes * self.figures.block_bytes
        )
        if region is None or region.kind is not Kind.SYSTEM:
            return None
        state = int(region.state[(address - region.span.address) // self.page_bytes])
        return {0: None, AT_HOST: HOST_NODE, ON_GPU: GPU_NODE}[state]


def refusal(verb: str, name: str) -> Refused:
    return Refused(verb, name, ERROR_CODES[name])
