"""The memory driver over NVIDIA's driver API, through `cuda.bindings.driver`. No other file uses these bindings.

Guarantees: a failing driver call raises DriverError with the driver's name for the error; the calling thread's current
context is unchanged afterwards (PyTorch reads its current device from it); all work uses one dedicated stream per
device, because the batch calls do not accept the NULL stream and no other work should wait for it.

Two generations of bindings are supported: the forms of cuMemAdvise and cuMemPrefetchAsync that take a location have the
plain names since 13 and the suffix _v2 in 12.x, where the plain names take a device number and cannot name a NUMA node.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

from supertuner.memory.driver import (
    HOST,
    AddressRange,
    DeviceProperties,
    DriverError,
    GpuLocation,
    HostNumaLocation,
    MemoryAdvice,
    MemoryKind,
    MemoryLocation,
    NotAvailable,
)

if TYPE_CHECKING:
    from types import ModuleType

MovePages: TypeAlias = Callable[[Sequence[int]], list[int]]
"""Addresses → the NUMA node of each page, or a negative errno: -ENOENT for a page that was never touched."""

LOCATION_API_VERSION = 12020
"""Drivers before CUDA 12.2 do not support locations. The driver of every superchip is newer."""
BATCH_API_VERSION = 13000
_CUDA_SUCCESS, _CU_DEVICE_INVALID, _CU_DEVICE_CPU = 0, -2, -1
_SYSCALL_NUMBERS = {"x86_64": 279, "aarch64": 239}


def kernel_move_pages(addresses: Sequence[int]) -> list[int]:
    """The NUMA node of each page from `move_pages(2)` in its query form, which moves nothing.

    Uses the system call number: glibc has no such function, and libnuma would be a further dependency. Where the kernel
    does not report nodes (built without NUMA, or a sandbox forbids the call), the result is -ENOSYS for every page.
    """
    number = _SYSCALL_NUMBERS.get(platform.machine())
    if number is None or not addresses:
        return [-errno.ENOSYS] * len(addresses)
    count = len(addresses)
    pages = (ctypes.c_void_p * count)(*addresses)
    status = (ctypes.c_int * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), 0, ctypes.c_ulong(count), pages, None, status, 0) == 0:
        return list(status)
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EPERM, errno.EACCES, errno.ENODEV):
        return [-errno.ENOSYS] * count
    raise OSError(code, f"move_pages: {os.strerror(code)}")


def open_cuda(move_pages: MovePages = kernel_move_pages) -> CudaDriver | NotAvailable:
    """The initialised driver of this machine; or why there is none, which takes less than a millisecond to
    determine.
    """
    try:
        ctypes.CDLL("libcuda.so.1")  # importing the bindings takes a hundred times as long as this check
    except OSError as error:
        if "cannot open shared object file" in str(error):
            return NotAvailable("no NVIDIA driver (libcuda.so.1) on this machine")
        return NotAvailable(f"libcuda.so.1 cannot be loaded: {error}")
    try:
        from cuda.bindings import driver as bindings
    except ImportError:
        return NotAvailable("cuda-bindings is not installed; `pip install cuda-bindings`")
    return start_driver(bindings, move_pages)


def start_driver(bindings: ModuleType, move_pages: MovePages) -> CudaDriver | NotAvailable:
    """Initialise the driver behind these bindings."""
    driver = CudaDriver(bindings, move_pages)
    try:
        _call(bindings.cuInit, 0)
        device_count, version = driver.device_count(), driver.version()
    except DriverError as error:
        if error.name == "CUDA_ERROR_NO_DEVICE":
            return NotAvailable("the driver found no GPU")
        return NotAvailable(f"the driver does not start ({error}); run `nvidia-smi` for details")
    if device_count == 0:
        return NotAvailable("the driver found no GPU")
    if version < LOCATION_API_VERSION:
        supported, needed = (f"{v // 1000}.{v % 1000 // 10}" for v in (version, LOCATION_API_VERSION))
        return NotAvailable(f"the driver supports CUDA {supported}; {needed} or newer is required")
    return driver


class CudaDriver:
    """`Driver` over CUDA, created by `open_cuda`. May be called from any thread, but not after a fork."""

    page_bytes = mmap.PAGESIZE

    def __init__(self, bindings: ModuleType, move_pages: MovePages = kernel_move_pages) -> None:
        self._cuda: Any = bindings
        self._move_pages = move_pages
        self._lock = Lock()
        self._contexts: dict[int, Any] = {}
        self._streams: dict[int, Any] = {}
        self._system_blocks: dict[int, mmap.mmap] = {}

    def device_count(self) -> int:
        return int(_call(self._cuda.cuDeviceGetCount))

    def version(self) -> int:
        return int(_call(self._cuda.cuDriverGetVersion))

    def devices(self) -> tuple[DeviceProperties, ...]:
        return tuple(self._device_properties(number) for number in range(self.device_count()))

    def _device_properties(self, number: int) -> DeviceProperties:
        name = bytes(_call(self._cuda.cuDeviceGetName, 128, number)).split(b"\0")[0].decode()
        major, minor = (self._device_attribute(number, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))

        def flag(attribute: str) -> bool | None:
            value = self._device_attribute(number, attribute)
            return None if value is None else bool(value)

        def node(attribute: str) -> int | None:
            value = self._device_attribute(number, attribute)
            return None if value is None or value < 0 else value

        return DeviceProperties(
            number=number,
            name=name,
            total_bytes=int(_call(self._cuda.cuDeviceTotalMem, number)),
            capability=None if major is None or minor is None else (major, minor),
            managed=flag("MANAGED_MEMORY"),
            concurrent_managed=flag("CONCURRENT_MANAGED_ACCESS"),
            pageable=flag("PAGEABLE_MEMORY_ACCESS"),
            host_page_tables=flag("PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES"),
            direct_host_access=flag("DIRECT_MANAGED_MEM_ACCESS_FROM_HOST"),
            integrated=flag("INTEGRATED"),
            numa_node=node("NUMA_ID") if flag("NUMA_CONFIG") else None,
            host_node=node("HOST_NUMA_ID"),
            uuid=f"GPU-{UUID(bytes=bytes(_call(self._cuda.cuDeviceGetUuid, number).bytes))}",
        )

    def _device_attribute(self, number: int, name: str) -> int | None:
        """The attribute's value; None if this driver does not know the attribute."""
        attribute = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        try:
            return int(_call(self._cuda.cuDeviceGetAttribute, attribute, number))
        except DriverError as error:
            if error.name != "CUDA_ERROR_INVALID_VALUE":
                raise
            return None

    def free_bytes(self, device: int) -> int:
        with self._device_context(device):
            free, _ = _call(self._cuda.cuMemGetInfo)
        return int(free)

    # ---- memory

    def allocate(self, kind: MemoryKind, nbytes: int, device: int = 0) -> int:
        if kind is MemoryKind.SYSTEM:
            return self._allocate_system(nbytes)
        with self._device_context(device):
            if kind is MemoryKind.MANAGED:
                attach = self._cuda.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
                return int(_call(self._cuda.cuMemAllocManaged, nbytes, attach.value))
            if kind is MemoryKind.DEVICE:
                return int(_call(self._cuda.cuMemAlloc, nbytes))
        raise DriverError(f"allocate({kind})", "CUDA_ERROR_INVALID_VALUE", 1)

    def _allocate_system(self, nbytes: int) -> int:
        if nbytes <= 0:
            raise DriverError("mmap", "CUDA_ERROR_INVALID_VALUE", 1)
        block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        with self._lock:
            self._system_blocks[address] = block
        return address

    def free(self, address: int) -> None:
        with self._lock:
            block = self._system_blocks.pop(address, None)
        if block is not None:
            block.close()
            return
        with self._device_context():
            _call(self._cuda.cuMemFree, address)

    def memory_kind_at(self, address: int) -> MemoryKind:
        names = self._cuda.CUpointer_attribute
        attributes = [names.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, names.CU_POINTER_ATTRIBUTE_IS_MANAGED]
        # The plural form of the call does not fail for a pointer that is not CUDA's: all attributes are then zero.
        memory_type, is_managed = _call(self._cuda.cuPointerGetAttributes, len(attributes), attributes, address)
        if is_managed:
            return MemoryKind.MANAGED
        host, device = self._cuda.CUmemorytype.CU_MEMORYTYPE_HOST, self._cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
        return {host.value: MemoryKind.PINNED, device.value: MemoryKind.DEVICE}.get(int(memory_type), MemoryKind.SYSTEM)

    # ---- hints

    def advise(self, span: AddressRange, advice: MemoryAdvice, location: MemoryLocation) -> None:
        advice_code = getattr(self._cuda.CUmem_advise, f"CU_MEM_ADVISE_SET_{advice.name}")
        cu_mem_advise = getattr(self._cuda, "cuMemAdvise_v2", self._cuda.cuMemAdvise)
        with self._device_context(_stream_device(location)):
            _call(cu_mem_advise, span.address, span.nbytes, advice_code, self._cu_location(location))

    def prefetch(self, spans: Sequence[AddressRange], location: MemoryLocation) -> None:
        if not spans:
            return
        with self._device_context(_stream_device(location)) as stream:
            target = self._cu_location(location)
            if self._has_batch_calls():
                _call(self._cuda.cuMemPrefetchBatchAsync, *self._batch_arguments(spans), [target], [0], 1, 0, stream)
                return
            cu_mem_prefetch = getattr(self._cuda, "cuMemPrefetchAsync_v2", self._cuda.cuMemPrefetchAsync)
            for span in spans:
                _call(cu_mem_prefetch, span.address, span.nbytes, target, 0, stream)

    def discard(self, spans: Sequence[AddressRange]) -> None:
        if not self._has_batch_calls():
            raise DriverError("cuMemDiscardBatchAsync", "CUDA_ERROR_NOT_FOUND", 500)
        if not spans:
            return
        with self._device_context() as stream:
            _call(self._cuda.cuMemDiscardBatchAsync, *self._batch_arguments(spans), 0, stream)

    def _batch_arguments(self, spans: Sequence[AddressRange]) -> tuple[list[object], list[int], int]:
        return [self._cuda.CUdeviceptr(span.address) for span in spans], [span.nbytes for span in spans], len(spans)

    def _has_batch_calls(self) -> bool:
        """Whether both driver and bindings have the batch calls: bindings of 12.x do not, whatever the driver."""
        return hasattr(self._cuda, "cuMemPrefetchBatchAsync") and self.version() >= BATCH_API_VERSION

    def _cu_location(self, memory_location: MemoryLocation) -> object:
        types, location = self._cuda.CUmemLocationType, self._cuda.CUmemLocation()
        if isinstance(memory_location, GpuLocation):
            location.type, location.id = types.CU_MEM_LOCATION_TYPE_DEVICE, memory_location.device
        elif isinstance(memory_location, HostNumaLocation):
            location.type, location.id = types.CU_MEM_LOCATION_TYPE_HOST_NUMA, memory_location.node
        else:
            location.type, location.id = types.CU_MEM_LOCATION_TYPE_HOST, 0
        return location

    def preferred_location(self, span: AddressRange) -> MemoryLocation | None:
        return self._range_location(span, "PREFERRED_LOCATION")

    def last_prefetch_location(self, span: AddressRange) -> MemoryLocation | None:
        return self._range_location(span, "LAST_PREFETCH_LOCATION")

    def _range_location(self, span: AddressRange, attribute: str) -> MemoryLocation | None:
        names, types = self._cuda.CUmem_range_attribute, self._cuda.CUmemLocationType
        attributes = [getattr(names, f"CU_MEM_RANGE_ATTRIBUTE_{attribute}_{part}") for part in ("TYPE", "ID")]
        with self._device_context():
            values = _call(self._cuda.cuMemRangeGetAttributes, [4, 4], attributes, 2, span.address, span.nbytes)
        kind, number = int(values[0]), int(values[1])
        if kind == types.CU_MEM_LOCATION_TYPE_DEVICE.value:
            return GpuLocation(number)
        if kind == types.CU_MEM_LOCATION_TYPE_HOST_NUMA.value:
            return HostNumaLocation(number)
        return HOST if kind == types.CU_MEM_LOCATION_TYPE_HOST.value else None

    def accessed_by(self, span: AddressRange) -> tuple[MemoryLocation, ...]:
        numbers = self._range_attribute(span, "ACCESSED_BY", 4 * (self.device_count() + 1))
        return tuple(HOST if n == _CU_DEVICE_CPU else GpuLocation(n) for n in numbers if n != _CU_DEVICE_INVALID)

    def read_mostly(self, span: AddressRange) -> bool:
        return bool(self._range_attribute(span, "READ_MOSTLY", 4))

    def _range_attribute(self, span: AddressRange, attribute: str, data_bytes: int) -> Any:
        name = getattr(self._cuda.CUmem_range_attribute, f"CU_MEM_RANGE_ATTRIBUTE_{attribute}")
        with self._device_context():
            return _call(self._cuda.cuMemRangeGetAttribute, data_bytes, name, span.address, span.nbytes)

    def locate(self, addresses: Sequence[int]) -> list[int | None]:
        return [node if node >= 0 else None for node in self._move_pages(addresses)]

    # ---- bytes

    def fill(self, span: AddressRange, value: int, device: int = 0) -> None:
        with self._device_context(device) as stream:
            _call(self._cuda.cuMemsetD8Async, span.address, value, span.nbytes, stream)
            _call(self._cuda.cuStreamSynchronize, stream)

    def copy(self, target: int, source: int, nbytes: int, device: int = 0) -> None:
        with self._device_context(device) as stream:
            _call(self._cuda.cuMemcpyAsync, target, source, nbytes, stream)
            _call(self._cuda.cuStreamSynchronize, stream)

    def read(self, span: AddressRange) -> bytes:
        if self.memory_kind_at(span.address) is not MemoryKind.DEVICE:
            return ctypes.string_at(span.address, span.nbytes)
        buffer = ctypes.create_string_buffer(span.nbytes)
        with self._device_context():
            _call(self._cuda.cuMemcpyDtoH, ctypes.addressof(buffer), span.address, span.nbytes)
        return buffer.raw

    def synchronize(self, device: int = 0) -> None:
        with self._lock:
            others = [number for number in self._streams if number != device]
        for number in (device, *others):  # a prefetch to the host may run on the stream of any device
            with self._device_context(number) as stream:
                _call(self._cuda.cuStreamSynchronize, stream)

    # ---- contexts and streams

    @contextmanager
    def _device_context(self, device: int | None = None) -> Iterator[Any]:
        """Make the device current for this thread, yield our stream on it, and restore the previous context afterwards.

        None: any device, for calls that all of them support. Prefers one that is already in use, because the first use
        of a GPU takes some of its memory.
        """
        with self._lock:
            number = next(iter(self._contexts), 0) if device is None else device
            if number not in self._contexts:
                self._contexts[number] = _call(self._cuda.cuDevicePrimaryCtxRetain, number)
        _call(self._cuda.cuCtxPushCurrent, self._contexts[number])
        try:
            yield self._stream(number)
        finally:
            _call(self._cuda.cuCtxPopCurrent)

    def _stream(self, device: int) -> Any:
        with self._lock:
            if device not in self._streams:
                non_blocking = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
                self._streams[device] = _call(self._cuda.cuStreamCreate, non_blocking.value)
            return self._streams[device]


def _stream_device(location: MemoryLocation) -> int | None:
    """The device whose stream does the work; None for the host, which has no stream."""
    return location.device if isinstance(location, GpuLocation) else None


def _call(function: Callable[..., Any], *arguments: object) -> Any:
    """Call the driver and return its results without the status: none, one, or a tuple."""
    status, *results = function(*arguments)
    if int(status) != _CUDA_SUCCESS:
        raise DriverError(function.__name__, status.name, int(status))
    return results[0] if len(results) == 1 else tuple(results)
