"""Copies a batch from an arena into one buffer: each byte once, by the faster of two loops for records of that size."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.catalog import U32, U64, ArenaCatalog
from supertuner.arena.format import ABSENT, DTYPES, PAGE
from supertuner.arena.payload import is_torch_tensor

if TYPE_CHECKING:
    import torch

UnitIndices: TypeAlias = Union[Sequence[int], NDArray[Any], "torch.Tensor"]
OutputBuffer: TypeAlias = Union[NDArray[Any], "torch.Tensor"]

_MAX_BYTES_BY_PAGES = 16 * PAGE
"""Records up to this size are copied with numpy's `take` over whole pages. Measured relative to one copy per record: 2
times as fast at 4 KiB, 1.02 times at 64 KiB, 0.96 times at 128 KiB, 0.95 times at 1 MB.
"""
_MAX_THREADS = 72
_MIN_BYTES_PER_THREAD = 4 << 20
"""Minimum bytes for which a further thread is used. Waking one takes up to some hundred microseconds in a virtual
machine: measured, two threads gained nothing on batches of 6 MB, and 1.2 to 1.5 times the speed of one on batches of
25 MB and more.
"""
_CHUNK_RECORDS = 1 << 16


@dataclass(frozen=True, slots=True)
class UniformRecords:
    """The common dtype, shape and size of a field whose records are all alike: a batch then needs no check
    per record.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def find_uniform_records(catalog: ArenaCatalog, field: str) -> UniformRecords | None:
    """None if a unit lacks the field, or records differ or are compressed. One pass, in chunks."""
    column = catalog.fields[field]
    if not len(column) or column[0] == ABSENT:
        return None
    kind, nbytes = catalog.kind[column[0]], catalog.nbytes[column[0]]
    record_kind = catalog.record_kind(int(kind))
    if record_kind.codec != "raw":
        return None
    for begin in range(0, len(column), _CHUNK_RECORDS):
        records = column[begin : begin + _CHUNK_RECORDS]
        absent = records.max() == ABSENT
        if absent or (catalog.kind[records] != kind).any() or (catalog.nbytes[records] != nbytes).any():
            return None
    return UniformRecords(record_kind.dtype, record_kind.shape_for(int(nbytes)), int(nbytes))


def check_unit_indices(indices: UnitIndices, count: int) -> NDArray[np.int64]:
    """The indices as an array; raises IndexError unless each is the number of a unit."""
    array = np.asarray(indices)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(f"indices must be integers in one dimension, not {array.dtype} of shape {array.shape}")
    units = np.ascontiguousarray(array, np.int64)
    if units.size and units.view(np.uint64).max() >= count:  # as uint64 a negative number is huge
        raise IndexError(f"indices range from {array.min()} to {array.max()}; the arena has units 0 to {count - 1}")
    return units


def record_numbers(catalog: ArenaCatalog, units: NDArray[np.int64], field: str, uniform: UniformRecords | None) -> U32:
    records = catalog.fields[field][units]
    if uniform is None and (records == ABSENT).any():
        missing_unit = int(units[np.flatnonzero(records == ABSENT)[0]])
        raise KeyError(f"unit {missing_unit} has no field {field!r}")
    return records


def check_output(
    catalog: ArenaCatalog, records: U32, out: OutputBuffer, uniform: UniformRecords | None
) -> tuple[NDArray[np.uint8], int]:
    """`out` as flat bytes, and the bytes of one row. Raises ValueError unless every record fits a row exactly."""
    buffer, dtype = flat_bytes(out)
    shape = tuple(out.shape)
    if not shape or shape[0] != len(records):
        raise ValueError(f"out has shape {shape}; its first dimension must be {len(records)}, the number of indices")
    if not len(records):
        return buffer, 0
    if uniform is not None and uniform.dtype == dtype and uniform.shape == shape[1:]:
        return buffer, uniform.nbytes
    return buffer, _check_row(catalog, records, dtype, shape[1:])


def copy_rows(pages: NDArray[np.uint8], offsets: U64, out: NDArray[np.uint8], nbytes: int) -> None:
    """Copy the record at each offset to the next row of `out`. Both loops release the GIL while they copy."""
    if nbytes <= _MAX_BYTES_BY_PAGES and nbytes % PAGE == 0:
        first = (offsets // PAGE).astype(np.intp)
        page_numbers = first if nbytes == PAGE else (first[:, None] + np.arange(nbytes // PAGE)).ravel()
        pages.take(page_numbers, 0, out.reshape(-1, PAGE), "clip")
        return
    memory, row = pages.reshape(-1), 0
    for start in offsets.tolist():
        out[row : row + nbytes] = memory[start : start + nbytes]
        row += nbytes


class CopyThreads:
    """Threads that copy parts of a batch in parallel with the caller; started at first use, ended by `close`.

    One core reaches only a fraction of a machine's memory bandwidth; a Grace CPU has 72.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._owner_pid = 0

    def copy(self, pages: NDArray[np.uint8], offsets: U64, out: NDArray[np.uint8], nbytes: int, threads: int) -> None:
        """`copy_rows` split over up to `threads` threads, including the caller's."""
        if not nbytes or not len(offsets):
            return
        parts = min(threads, _MAX_THREADS, len(offsets), out.nbytes // _MIN_BYTES_PER_THREAD)
        if parts <= 1:
            copy_rows(pages, offsets, out, nbytes)
            return
        edges = [len(offsets) * part // parts for part in range(parts + 1)]
        pool = self._thread_pool()
        futures = [
            pool.submit(copy_rows, pages, offsets[begin:end], out[begin * nbytes : end * nbytes], nbytes)
            for begin, end in pairwise(edges[1:])
        ]
        copy_rows(pages, offsets[: edges[1]], out[: edges[1] * nbytes], nbytes)
        for future in futures:
            future.result()

    def close(self) -> None:
        with self._lock:
            if self._pool is not None and self._owner_pid == os.getpid():
                self._pool.shutdown()
            self._pool = None

    def _thread_pool(self) -> ThreadPoolExecutor:
        """The pool, which starts threads on demand. A forked child inherits none of them and creates its own."""
        with self._lock:
            if self._pool is None or self._owner_pid != os.getpid():
                self._pool = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="arena-copy")
                self._owner_pid = os.getpid()
            return self._pool


def flat_bytes(out: OutputBuffer) -> tuple[NDArray[np.uint8], str]:
    """`out` as writable bytes in one dimension, without a copy, and the name of its dtype."""
    if isinstance(out, np.ndarray):
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError("out must be contiguous and writable")
        return out.reshape(-1).view(np.uint8), _NUMPY_NAMES.get(out.dtype.str) or out.dtype.name
    if not is_torch_tensor(out):
        raise ValueError(f"out is a {type(out).__name__}; it must be a numpy array or a torch tensor")
    if not out.is_contiguous() or out.device.type != "cpu":
        raise ValueError(f"out must be contiguous and on the CPU; it is on {out.device}")
    import torch

    return out.detach().reshape(-1).view(torch.uint8).numpy(), str(out.dtype).removeprefix("torch.")


def _check_row(catalog: ArenaCatalog, records: U32, dtype: str, row_shape: tuple[int, ...]) -> int:
    kinds, nbytes = catalog.kind[records], catalog.raw_nbytes[records]
    for number in set(kinds.tolist()):
        kind = catalog.record_kind(number)
        if kind.codec != "raw":
            raise ValueError(f"a record is compressed with {kind.codec}; gather copies only uncompressed records")
        expected = kind.shape_for(int(nbytes[kinds == number][0]))
        if (dtype, row_shape) not in ((kind.dtype, expected), ("uint8", (int(nbytes[0]),))):
            raise ValueError(f"out has rows of {dtype} {row_shape}; a record has {kind.dtype} {expected}")
    if (nbytes != nbytes[0]).any():
        raise ValueError(f"records of {nbytes.min()} to {nbytes.max()} bytes do not fit rows of one size; use view()")
    return int(nbytes[0])


_NUMPY_NAMES = {np.dtype(name).str: name for name in DTYPES if not name.startswith(("bfloat", "float8"))}
"""`<f4` → `float32`. A table, because numpy's own name property takes microseconds."""
