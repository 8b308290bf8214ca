"""Creates torch tensors over memory that torch did not allocate, through the DLPack protocol.

Such a tensor does not own its memory: the caller frees it, and only after `ForeignStorage.alive` is False. torch has no
deleter to call, so no Python code runs when a tensor ends, on any thread and at any time.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

# DLDeviceType of dlpack.h. Managed memory is declared as CUDA, because torch rejects kDLCUDAManaged.
DL_DEVICE_TYPES = {"cpu": 1, "cuda": 2}
DL_UINT, BITS_PER_ELEMENT = 1, 8
CAPSULE_NAME = b"dltensor"  # a capsule stores the pointer, not a copy


class _DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h, with its device and type structures inlined."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h, followed by the shape and stride that it points to."""

    _fields_ = (
        ("tensor", _DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("length", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class ForeignStorage:
    """The storage of a tensor over foreign memory."""

    storage_ref: StorageWeakRef

    @property
    def alive(self) -> bool:
        """Whether any tensor still uses the memory, including views and tensors that autograd saved."""
        return not self.storage_ref.expired()  # type: ignore[no-untyped-call]


class DLPackHeader:
    """The structure that torch points to while a tensor over the memory exists; it must exist as long. One per block.

    It is raw memory on purpose: a Python object could be freed with the interpreter before the last tensor.
    """

    def __init__(self, device: torch.device) -> None:
        raw = _c_api_function("PyMem_RawMalloc", ctypes.c_void_p, ctypes.c_size_t)(ctypes.sizeof(_DLManagedTensor))
        if not raw:
            raise MemoryError("no memory for a DLPack header of a hundred bytes")
        self._header_address: int = raw
        header = _DLManagedTensor.from_address(raw)
        header.tensor = _DLTensor(
            None, DL_DEVICE_TYPES[device.type], device.index or 0, 1, DL_UINT, BITS_PER_ELEMENT, 1,
            raw + _DLManagedTensor.length.offset, raw + _DLManagedTensor.stride.offset, 0,
        )  # fmt: skip
        header.context, header.deleter = None, None
        header.length, header.stride = 0, 1

    def point_at(self, address: int, nbytes: int) -> None:
        """Point at this memory. Only valid when no tensor over the previous memory is alive."""
        header = _DLManagedTensor.from_address(self._header_address)
        header.tensor.address, header.length = address, nbytes

    def make_tensor(self) -> tuple[torch.Tensor, ForeignStorage]:
        """A new uint8 tensor over the memory, and the object that reports when it and its views are gone."""
        new = _c_api_function("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        tensor = from_dlpack(new(self._header_address, CAPSULE_NAME, None))
        return tensor, ForeignStorage(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]

    def free(self) -> None:
        """Free the header. Only valid when no tensor over the memory is alive and the last one ended on this thread."""
        _c_api_function("PyMem_RawFree", None, ctypes.c_void_p)(self._header_address)


def _c_api_function(name: str, result: type | None, *arguments: type) -> ctypes._FuncPointer:
    """A function of Python's C API, as a separate pointer: types set on the shared one would apply to all its users."""
    prototype = ctypes.PYFUNCTYPE(result, *arguments)
    return prototype((name, ctypes.pythonapi))
