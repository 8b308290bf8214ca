"""The seam over NVIDIA's driver API, through `cuda.bindings.driver`: the only file that knows it.

Guarantees: a call that the driver refuses is a `Refused` with the driver's own name for why; the calling thread's
current context is afterwards what it was before (PyTorch reads its current device from it); all work goes through one
stream of our own per device, because the batch calls refuse the NULL stream and nobody's work should wait for ours.

Two generations of bindings: the forms of cuMemAdvise and cuMemPrefetchAsync that take a location have the plain names
since 13 and the suffix _v2 in 12.x, where the plain names take a device number and cannot name a NUMA node.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any
from uuid import UUID

from supertuner.memory.driver import HOST, Advice, Device, Gpu, Home, HostNode, Kind, Missing, Refused, Span
from supertuner.memory.pages import MovePages, kernel_move_pages

if TYPE_CHECKING:
    from types import ModuleType

LOCATIONS_SINCE = 12020
"""Before CUDA 12.2 a driver knows no locations; every superchip's driver is newer."""
BATCHES_SINCE = 13000
_SUCCESS, _NOTHING, _CPU = 0, -2, -1
_ADVICE = {
    Advice.PREFERRED_LOCATION: "PREFERRED_LOCATION",
    Advice.ACCESSED_BY: "ACCESSED_BY",
    Advice.READ_MOSTLY: "READ_MOSTLY",
}


def open_cuda(move_pages: MovePages = kernel_move_pages) -> CudaDriver | Missing:
    """The driver of this machine, initialised; or why there is none, which takes under a millisecond."""
    try:
        ctypes.CDLL("libcuda.so.1")  # importing the bindings takes a hundred times as long as knowing that
    except OSError as error:
        absent = "cannot open shared object file" in str(error)
        return Missing("no NVIDIA driver (libcuda.so.1) here" if absent else f"libcuda.so.1 cannot be loaded: {error}")
    try:
        from cuda.bindings import driver as bindings
    except ImportError:
        return Missing("cuda-bindings is not installed; `pip install cuda-bindings`")
    return start(bindings, move_pages)


def start(bindings: ModuleType, move_pages: MovePages) -> CudaDriver | Missing:
    """Initialise the driver below these bindings."""
    driver = CudaDriver(bindings, move_pages)
    try:
        driver.initialise()
        devices, version = driver.count(), driver.version()
    except Refused as refused:
        if refused.name == "CUDA_ERROR_NO_DEVICE":
            return Missing("the driver found no GPU")
        return Missing(f"the driver does not start ({refused}); `nvidia-smi` may say more")
    if devices == 0:
        return Missing("the driver found no GPU")
    if version < LOCATIONS_SINCE:
        needed = f"{LOCATIONS_SINCE // 1000}.{LOCATIONS_SINCE % 1000 // 10}"
        return Missing(f"the driver is of CUDA {version // 1000}.{version % 1000 // 10}; {needed} or newer is needed")
    return driver


class CudaDriver:
    """`Driver` over CUDA. Made by `open_cuda`; may be called from any thread, not after a fork."""

    page_bytes = mmap.PAGESIZE

    def __init__(self, bindings: ModuleType, move_pages: MovePages = kernel_move_pages) -> None:
        self._cuda: Any = bindings
        self._move_pages = move_pages
        self._lock = Lock()
        self._contexts: dict[int, Any] = {}
        self._streams: dict[int, Any] = {}
        self._system: dict[int, mmap.mmap] = {}

    def initialise(self) -> None:
        _ask(self._cuda.cuInit, 0)

    def count(self) -> int:
        return int(_ask(self._cuda.cuDeviceGetCount))

    def version(self) -> int:
        return int(_ask(self._cuda.cuDriverGetVersion))

    def devices(self) -> tuple[Device, ...]:
        return tuple(self._device(number) for number in range(self.count()))

    def _device(self, number: int) -> Device:
        name = bytes(_ask(self._cuda.cuDeviceGetName, 128, number)).split(b"\0")[0].decode()
        major, minor = (self._attribute(number, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))

        def flag(attribute: str) -> bool | None:
            value = self._attribute(number, attribute)
            return None if value is None else bool(value)

        def node(attribute: str) -> int | None:
            value = self._attribute(number, attribute)
            return None if value is None or value < 0 else value

        return Device(
            number=number,
            name=name,
            total_bytes=int(_ask(self._cuda.cuDeviceTotalMem, number)),
            capability=None if major is None or minor is None else (major, minor),
            managed=flag("MANAGED_MEMORY"),
            concurrent_managed=flag("CONCURRENT_MANAGED_ACCESS"),
            pageable=flag("PAGEABLE_MEMORY_ACCESS"),
            host_page_tables=flag("PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES"),
            direct_host_access=flag("DIRECT_MANAGED_MEM_ACCESS_FROM_HOST"),
            integrated=flag("INTEGRATED"),
            numa_node=node("NUMA_ID") if flag("NUMA_CONFIG") else None,
            host_node=node("HOST_NUMA_ID"),
            uuid=f"GPU-{UUID(bytes=bytes(_ask(self._cuda.cuDeviceGetUuid, number).bytes))}",
        )

    def _attribute(self, number: int, name: str) -> int | None:
        """None: this driver does not know the attribute."""
        attribute = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        try:
            return int(_ask(self._cuda.cuDeviceGetAttribute, attribute, number))
        except Refused as refused:
            if refused.name != "CUDA_ERROR_INVALID_VALUE":
                raise
            return None

    def free_bytes(self, device: int) -> int:
        with self._on(device):
            free, _ = _ask(self._cuda.cuMemGetInfo)
        return int(free)

    # ---- memory

    def allocate(self, kind: Kind, nbytes: int, device: int = 0) -> int:
        if kind is Kind.SYSTEM:
            return self._take_from_system(nbytes)
        with self._on(device):
            if kind is Kind.MANAGED:
                attach = self._cuda.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
                return int(_ask(self._cuda.cuMemAllocManaged, nbytes, attach.value))
            if kind is Kind.DEVICE:
                return int(_ask(self._cuda.cuMemAlloc, nbytes))
        raise Refused(f"allocate({kind})", "CUDA_ERROR_INVALID_VALUE", 1)

    def _take_from_system(self, nbytes: int) -> int:
        if nbytes <= 0:
            raise Refused("mmap", "CUDA_ERROR_INVALID_VALUE", 1)
        block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        with self._lock:
            self._system[address] = block
        return address

    def free(self, address: int) -> None:
        with self._lock:
            block = self._system.pop(address, None)
        if block is not None:
            block.close()
            return
        with self._on():
            _ask(self._cuda.cuMemFree, address)

    def kind_of(self, address: int) -> Kind:
        names = self._cuda.CUpointer_attribute
        wanted = [names.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, names.CU_POINTER_ATTRIBUTE_IS_MANAGED]
        # In the plural the call does not fail for a pointer that is not CUDA's: all attributes are then zero.
        memory_type, is_managed = _ask(self._cuda.cuPointerGetAttributes, len(wanted), wanted, address)
        if is_managed:
            return Kind.MANAGED
        host, device = (self._cuda.CUmemorytype.CU_MEMORYTYPE_HOST, self._cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE)
        return {host.value: Kind.PINNED, device.value: Kind.DEVICE}.get(int(memory_type), Kind.SYSTEM)

    # ---- hints

    def advise(self, span: Span, advice: Advice, home: Home) -> None:
        self._advise(span, f"SET_{_ADVICE[advice]}", home)

    def unadvise(self, span: Span, advice: Advice, home: Home) -> None:
        self._advise(span, f"UNSET_{_ADVICE[advice]}", home)

    def _advise(self, span: Span, advice: str, home: Home) -> None:
        number = getattr(self._cuda.CUmem_advise, f"CU_MEM_ADVISE_{advice}")
        take_location = getattr(self._cuda, "cuMemAdvise_v2", self._cuda.cuMemAdvise)
        with self._on(_device_of(home)):
            _ask(take_location, span.address, span.nbytes, number, self._location(home))

    def prefetch(self, spans: Sequence[Span], home: Home) -> None:
        if not spans:
            return
        with self._on(_device_of(home)) as stream:
            place = self._location(home)
            if self._has_batches():
                _ask(self._cuda.cuMemPrefetchBatchAsync, *self._batch(spans), [place], [0], 1, 0, stream)
                return
            take_location = getattr(self._cuda, "cuMemPrefetchAsync_v2", self._cuda.cuMemPrefetchAsync)
            for span in spans:
                _ask(take_location, span.address, span.nbytes, place, 0, stream)

    def discard(self, spans: Sequence[Span]) -> None:
        if not self._has_batches():
            raise Refused("cuMemDiscardBatchAsync", "CUDA_ERROR_NOT_FOUND", 500)
        if not spans:
            return
        with self._on() as stream:
            _ask(self._cuda.cuMemDiscardBatchAsync, *self._batch(spans), 0, stream)

    def _batch(self, spans: Sequence[Span]) -> tuple[list[object], list[int], int]:
        return [self._cuda.CUdeviceptr(span.address) for span in spans], [span.nbytes for span in spans], len(spans)

    def _has_batches(self) -> bool:
        """Both sides must know them: bindings of 12.x do not, whatever the driver."""
        return hasattr(self._cuda, "cuMemPrefetchBatchAsync") and self.version() >= BATCHES_SINCE

    def _location(self, home: Home) -> object:
        types, location = self._cuda.CUmemLocationType, self._cuda.CUmemLocation()
        if isinstance(home, Gpu):
            location.type, location.id = types.CU_MEM_LOCATION_TYPE_DEVICE, home.device
        elif isinstance(home, HostNode):
            location.type, location.id = types.CU_MEM_LOCATION_TYPE_HOST_NUMA, home.node
        else:
            location.type, location.id = types.CU_MEM_LOCATION_TYPE_HOST, 0
        return location

    def preferred(self, span: Span) -> Home | None:
        return self._home_in(span, "PREFERRED_LOCATION")

    def last_prefetch(self, span: Span) -> Home | None:
        return self._home_in(span, "LAST_PREFETCH_LOCATION")

    def _home_in(self, span: Span, attribute: str) -> Home | None:
        names, types = self._cuda.CUmem_range_attribute, self._cuda.CUmemLocationType
        wanted = [getattr(names, f"CU_MEM_RANGE_ATTRIBUTE_{attribute}_{part}") for part in ("TYPE", "ID")]
        with self._on():
            where = _ask(self._cuda.cuMemRangeGetAttributes, [4, 4], wanted, 2, span.address, span.nbytes)
        kind, number = int(where[0]), int(where[1])
        if kind == types.CU_MEM_LOCATION_TYPE_DEVICE.value:
            return Gpu(number)
        if kind == types.CU_MEM_LOCATION_TYPE_HOST_NUMA.value:
            return HostNode(number)
        return HOST if kind == types.CU_MEM_LOCATION_TYPE_HOST.value else None

    def accessed_by(self, span: Span) -> tuple[Home, ...]:
        room = 4 * (self.count() + 1)
        numbers = self._range_attribute(span, "ACCESSED_BY", room)
        return tuple(HOST if number == _CPU else Gpu(number) for number in numbers if number != _NOTHING)

    def read_mostly(self, span: Span) -> bool:
        return bool(self._range_attribute(span, "READ_MOSTLY", 4))

    def _range_attribute(self, span: Span, attribute: str, room: int) -> Any:
        name = getattr(self._cuda.CUmem_range_attribute, f"CU_MEM_RANGE_ATTRIBUTE_{attribute}")
        with self._on():
            return _ask(self._cuda.cuMemRangeGetAttribute, room, name, span.address, span.nbytes)

    def locate(self, addresses: Sequence[int]) -> list[int | None]:
        return [node if node >= 0 else None for node in self._move_pages(addresses)]

    # ---- bytes

    def fill(self, span: Span, value: int, device: int = 0) -> None:
        with self._on(device) as stream:
            _ask(self._cuda.cuMemsetD8Async, span.address, value, span.nbytes, stream)
            _ask(self._cuda.cuStreamSynchronize, stream)

    def copy(self, target: int, source: int, nbytes: int, device: int = 0) -> None:
        with self._on(device) as stream:
            _ask(self._cuda.cuMemcpyAsync, target, source, nbytes, stream)
            _ask(self._cuda.cuStreamSynchronize, stream)

    def read(self, span: Span) -> bytes:
        if self.kind_of(span.address) is not Kind.DEVICE:
            return ctypes.string_at(span.address, span.nbytes)
        buffer = ctypes.create_string_buffer(span.nbytes)
        with self._on():
            _ask(self._cuda.cuMemcpyDtoH, ctypes.addressof(buffer), span.address, span.nbytes)
        return buffer.raw

    def synchronize(self, device: int = 0) -> None:
        with self._lock:
            others = [number for number in self._streams if number != device]
        for number in (device, *others):  # by any of them something may have gone to the host
            with self._on(number) as stream:
                _ask(self._cuda.cuStreamSynchronize, stream)

    # ---- contexts and streams

    @contextmanager
    def _on(self, device: int | None = None) -> Iterator[Any]:
        """This thread works on that device, with our stream there, and afterwards on whatever it was before.

        None: on any, for what all of them can do. It is one that was used before, because to use a GPU takes memory
        of it.
        """
        with self._lock:
            number = next(iter(self._contexts), 0) if device is None else device
            if number not in self._contexts:
                self._contexts[number] = _ask(self._cuda.cuDevicePrimaryCtxRetain, number)
        _ask(self._cuda.cuCtxPushCurrent, self._contexts[number])
        try:
            yield self._stream(number)
        finally:
            _ask(self._cuda.cuCtxPopCurrent)

    def _stream(self, device: int) -> Any:
        with self._lock:
            if device not in self._streams:
                unblocked = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
                self._streams[device] = _ask(self._cuda.cuStreamCreate, unblocked.value)
            return self._streams[device]


def _device_of(home: Home) -> int | None:
    """The device whose stream does the work: the host has none of its own."""
    return home.device if isinstance(home, Gpu) else None


def _ask(function: Callable[..., Any], *arguments: object) -> Any:
    """What a driver call gives besides its status: nothing, one thing, or several."""
    status, *given = function(*arguments)
    if int(status) != _SUCCESS:
        raise Refused(function.__name__, status.name, int(status))
    return given[0] if len(given) == 1 else tuple(given)
