"""A batch from an arena into one buffer: one copy per byte, by whichever loop is faster for records of that size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.catalog import Catalog
from supertuner.arena.format import ABSENT, PAGE
from supertuner.arena.payload import is_torch

if TYPE_CHECKING:
    import torch

Indices: TypeAlias = Union[Sequence[int], NDArray[Any], "torch.Tensor"]
Out: TypeAlias = Union[NDArray[Any], "torch.Tensor"]

_BY_PAGES = 4 * PAGE
"""Up to this size numpy's take on whole pages beats one slice copy per record (measured: 1.5 times at 4 KiB)."""


def units_of(indices: Indices, count: int) -> NDArray[np.int64]:
    """The indices as an array, each one of an existing unit."""
    units = np.asarray(indices)
    if units.ndim != 1 or (units.dtype.kind not in "iu" and units.size):
        raise ValueError(f"indices must be whole numbers in one dimension, not {units.dtype} of shape {units.shape}")
    if units.size and (units.min() < 0 or units.max() >= count):
        raise IndexError(f"indices from {units.min()} to {units.max()}; the arena has units 0 to {count - 1}")
    return units.astype(np.int64, copy=False)


def records_of(catalog: Catalog, units: NDArray[np.int64], field: str) -> NDArray[np.int64]:
    records = catalog.fields[field][units]
    if (records == ABSENT).any():
        missing = int(units[np.flatnonzero(records == ABSENT)[0]])
        raise KeyError(f"unit {missing} has no field {field!r}")
    return records.astype(np.int64)


def checked_out(catalog: Catalog, records: NDArray[np.int64], out: Out) -> tuple[NDArray[np.uint8], int]:
    """`out` as flat bytes and the bytes of one row, if every record fits a row of it exactly."""
    buffer, dtype = _flat(out)
    shape = tuple(out.shape)
    if not shape or shape[0] != len(records):
        raise ValueError(f"out has shape {shape}; the first side must be {len(records)}, the number of indices")
    if not len(records):
        return buffer, 0
    kinds, nbytes = catalog.kind[records], catalog.raw_nbytes[records]
    for number in set(kinds.tolist()):
        kind = catalog.kind_of(number)
        if kind.codec != "raw":
            raise ValueError(f"a record is compressed with {kind.codec}; gather copies raw records only")
        expected = kind.shape_of(int(nbytes[kinds == number][0]))
        if (dtype, shape[1:]) not in ((kind.dtype, expected), ("uint8", (int(nbytes[0]),))):
            raise ValueError(f"out holds rows of {dtype} {shape[1:]}; a record is {kind.dtype} {expected}")
    if (nbytes != nbytes[0]).any():
        raise ValueError(f"records of {nbytes.min()} to {nbytes.max()} bytes do not fit rows of one size; use view()")
    return buffer, int(nbytes[0])


def copy_rows(memory: memoryview, offsets: NDArray[np.uint64], out: NDArray[np.uint8], nbytes: int) -> None:
    """Copy the record at each offset to the next row of `out`."""
    if not nbytes or not len(offsets):
        return
    if nbytes <= _BY_PAGES and nbytes % PAGE == 0:
        pages = np.frombuffer(memory, np.uint8).reshape(-1, PAGE)
        first = (offsets // PAGE).astype(np.intp)
        wanted = first if nbytes == PAGE else (first[:, None] + np.arange(nbytes // PAGE)).ravel()
        np.take(pages, wanted, axis=0, out=out.reshape(-1, PAGE), mode="clip")
        return
    target, row = out.data, 0
    for start in offsets.tolist():
        target[row : row + nbytes] = memory[start : start + nbytes]
        row += nbytes


def _flat(out: Out) -> tuple[NDArray[np.uint8], str]:
    """`out` as writable bytes in one dimension, without a copy, and its dtype's name."""
    if isinstance(out, np.ndarray):
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError("out must be contiguous and writable")
        return out.reshape(-1).view(np.uint8), out.dtype.name
    if not is_torch(out):
        raise ValueError(f"out is a {type(out).__name__}; it must be a numpy array or a torch tensor")
    if not out.is_contiguous() or out.device.type != "cpu":
        raise ValueError(f"out must be contiguous and on the CPU; it is on {out.device}")
    import torch

    return out.detach().reshape(-1).view(torch.uint8).numpy(), str(out.dtype).removeprefix("torch.")
