"""Converts payloads between bytes and numpy arrays or torch tensors, with the record kind they are stored under."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.format import DTYPES, RecordKind

if TYPE_CHECKING:
    import torch

Payload: TypeAlias = Union[bytes, bytearray, memoryview, NDArray[Any], "torch.Tensor"]

_BYTES_KIND = RecordKind("uint8", None)


def is_torch_tensor(value: object) -> bool:
    """Whether this is a torch tensor, determined without importing torch."""
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__)


def as_bytes(payload: Payload) -> tuple[memoryview, RecordKind]:
    """The payload's bytes (without a copy if it is contiguous) and its kind."""
    if isinstance(payload, np.ndarray):
        return _array_bytes(payload)
    if is_torch_tensor(payload):
        return _tensor_bytes(payload)
    view = memoryview(payload)  # type: ignore[arg-type]
    return (view if view.format == "B" and view.ndim == 1 else view.cast("B")), _BYTES_KIND


def check_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"an arena cannot store {name}; it stores {', '.join(DTYPES)}")
    return name


@cache
def torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def numpy_dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError as error:
        raise ValueError(f"numpy has no dtype {name}; read the record with tensor() or view()") from error


def _array_bytes(array: NDArray[Any]) -> tuple[memoryview, RecordKind]:
    kind = RecordKind(check_dtype(array.dtype.name), None if array.ndim == 1 else array.shape)
    return _flat_bytes(np.ascontiguousarray(array, array.dtype.newbyteorder("<"))), kind


def _tensor_bytes(tensor: Any) -> tuple[memoryview, RecordKind]:
    import torch

    assert tensor.device.type == "cpu", f"the tensor is on {tensor.device}; move it to the CPU first"
    dtype = check_dtype(str(tensor.dtype).removeprefix("torch."))
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return _flat_bytes(flat.numpy()), RecordKind(dtype, None if tensor.ndim == 1 else tuple(tensor.shape))


def _flat_bytes(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
