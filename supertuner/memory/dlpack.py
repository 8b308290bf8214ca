"""A torch tensor over memory that torch did not allocate, through the DLPack protocol.

The tensor owns nothing: whoever gave the address gives the memory back, and not before `Wrapped.alive` is false. There
is no deleter for torch to call, so nothing of Python runs when a tensor ends, on whatever thread and however late.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

# DLDeviceType of dlpack.h. Managed memory is announced as CUDA: torch refuses kDLCUDAManaged.
DEVICE_TYPES = {"cpu": 1, "cuda": 2}
UNSIGNED, BITS = 1, 8
NAME = b"dltensor"  # a capsule keeps the pointer, not a copy


class _Tensor(ctypes.Structure):
    """DLTensor, with its device and type spelled out."""

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


class _Header(ctypes.Structure):
    """DLManagedTensor, followed by the shape it points to."""

    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("length", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Wrapped:
    """Bytes of foreign memory as a tensor."""

    storage: StorageWeakRef

    @property
    def alive(self) -> bool:
        """Whether any tensor still uses the memory: views, and what autograd saved, included."""
        return not self.storage.expired()  # type: ignore[no-untyped-call]


class Header:
    """What torch keeps a pointer to while a tensor over the memory lives, so it must live as long: one per block.

    It is raw memory on purpose: one that ends with the interpreter could end before the last tensor.
    """

    def __init__(self, device: torch.device) -> None:
        raw = _function("PyMem_RawMalloc", ctypes.c_void_p, ctypes.c_size_t)(ctypes.sizeof(_Header))
        if not raw:
            raise MemoryError("no memory for a header of a hundred bytes")
        self._raw: int = raw
        header = _Header.from_address(raw)
        header.tensor = _Tensor(
            None, DEVICE_TYPES[device.type], device.index or 0, 1, UNSIGNED, BITS, 1,
            raw + _Header.length.offset, raw + _Header.stride.offset, 0,
        )  # fmt: skip
        header.context, header.deleter = None, None
        header.length, header.stride = 0, 1

    def aim(self, address: int, nbytes: int) -> None:
        """At this memory from now on; only when no tensor over the memory before is alive."""
        header = _Header.from_address(self._raw)
        header.tensor.address, header.length = address, nbytes

    def wrap(self) -> tuple[torch.Tensor, Wrapped]:
        """A new tensor of bytes over the memory, and what tells when it and its views are gone."""
        new = _function("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        tensor = from_dlpack(new(self._raw, NAME, None))
        return tensor, Wrapped(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]

    def free(self) -> None:
        """Only when no tensor over the memory is alive, and the last one ended on this thread."""
        _function("PyMem_RawFree", None, ctypes.c_void_p)(self._raw)


def _function(name: str, result: type | None, *arguments: type) -> ctypes._FuncPointer:
    """A function of the interpreter. A pointer of our own: types set on the shared one would be everybody's."""
    kind = ctypes.PYFUNCTYPE(result, *arguments)
    return kind((name, ctypes.pythonapi))
