"""Reads a sealed arena: zero-copy, read-only, and protected from removal while it is open."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from supertuner.arena import gather
from supertuner.arena.catalog import U32, ArenaCatalog
from supertuner.arena.folder import INDEX_FILE, ArenaFolder
from supertuner.arena.format import ABSENT, PAGE, RecordKind
from supertuner.arena.gather import OutputBuffer, UnitIndices, check_unit_indices, record_numbers
from supertuner.arena.payload import numpy_dtype, torch_dtype
from supertuner.arena.verify import VerificationStopped, check_record, verify_arena
from supertuner.core.closing import CloseOnExit
from supertuner.core.errors import ArenaDamagedError, ArenaError
from supertuner.core.events import NullSink, Progress
from supertuner.core.types import JSON

if TYPE_CHECKING:
    import torch

VerifyMode: TypeAlias = Literal["on_demand", "background", "always"]
"""When payload checksums are checked: only by `verify()`, by a background thread after attaching, or
before every read.
"""


class ArenaReader(CloseOnExit):
    """A reader of one arena. Views stay valid after `close()` for as long as they are referenced; `close()` releases
    the lock.
    """

    def __init__(
        self,
        folder: ArenaFolder,
        catalog: ArenaCatalog,
        memory: mmap.mmap,
        verify: VerifyMode,
        on_close: Callable[[], object] | None = None,
    ) -> None:
        self._folder, self._catalog, self._memory, self._on_close = folder, catalog, memory, on_close
        self._always_verify = verify == "always"
        self._verification_error: ArenaError | None = None
        self._stop = threading.Event()
        self._copy_threads = gather.CopyThreads()
        self._bytes = memoryview(memory).toreadonly()
        self._pages = np.frombuffer(self._bytes, np.uint8).reshape(-1, PAGE)
        # Columns are also kept as memoryviews, where reading a single number is cheap.
        self._offset, self._nbytes, self._raw_nbytes = catalog.offset.data, catalog.nbytes.data, catalog.raw_nbytes.data
        self._columns = {name: column.data for name, column in catalog.fields.items()}
        self._record_kind_at = lru_cache(maxsize=1024)(catalog.record_kind)
        self._uniform_records = cache(partial(gather.find_uniform_records, catalog))
        self._verify_thread: threading.Thread | None = None
        if verify == "background":
            self._verify_thread = threading.Thread(target=self._verify_in_background, name="arena-verify", daemon=True)
            self._verify_thread.start()

    def __len__(self) -> int:
        return len(self._catalog.keys)

    @property
    def name(self) -> str:
        return self._folder.path.name

    @property
    def memory_range(self) -> tuple[int, int]:
        """Address and size of the mapped records in this process. They stay mapped until the last view is
        garbage-collected.
        """
        return self._pages.ctypes.data, self._pages.nbytes

    @property
    def meta(self) -> Mapping[str, JSON]:
        """The mapping that was passed to `seal`."""
        return self._catalog.meta

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self._catalog.fields)

    @property
    def tables(self) -> tuple[str, ...]:
        return tuple(self._catalog.tables)

    def key(self, i: int) -> str:
        self._check_unit(i)
        key = self._catalog.keys.key_at(i)
        try:
            return key.decode()
        except UnicodeDecodeError as error:
            file = self._folder.file_path(INDEX_FILE)
            raise ArenaDamagedError(file, f"key {i} is not UTF-8: {key[:80]!r}") from error

    def find(self, key: str) -> int | None:
        """The number of the unit with this key, or None."""
        return self._catalog.keys.find(key.encode(errors="surrogatepass"))

    def fixed_width_keys(self, nbytes: int) -> NDArray[np.bytes_] | None:
        """All keys in order as one array, without a copy; None unless every key has `nbytes` bytes."""
        return self._catalog.keys.fixed_width_array(nbytes)

    def record_fingerprints(self, field: str = "media") -> NDArray[np.uint64]:
        """One row per unit that identifies its record: checksum, stored bytes, uncompressed bytes, digest of the
        codec's name.
        """
        self._check_readable(field)
        catalog = self._catalog
        records = record_numbers(catalog, np.arange(len(self)), field, None)
        names = [catalog.record_kind(number).codec.encode() for number in range(len(catalog.kinds))]
        codecs = np.array([xxhash.xxh3_64_intdigest(name) for name in names], np.uint64)
        columns = (catalog.checksum, catalog.nbytes, catalog.raw_nbytes)
        return np.stack([*(column[records] for column in columns), codecs[catalog.kind[records]]], axis=1)

    def has(self, i: int, field: str) -> bool:
        self._check_unit(i)
        return field in self._columns and self._columns[field][i] != ABSENT

    def view(self, i: int, field: str = "media") -> memoryview:
        """The stored bytes, read-only; for a compressed record, the compressed bytes."""
        record = self._record(i, field)
        begin = self._offset[record]
        return self._bytes[begin : begin + self._nbytes[record]]

    def array(self, i: int, field: str = "media") -> NDArray[Any]:
        """The record as a read-only array of its dtype and shape."""
        return self._record_array(self._record(i, field))

    def tensor(self, i: int, field: str = "media") -> torch.Tensor:
        """The record as a tensor over the arena's memory. Writing to it changes only this process's copy
        of the page.
        """
        import torch

        record = self._record(i, field)
        kind, raw_nbytes = self._raw_record_kind(record), self._raw_nbytes[record]
        dtype, shape = torch_dtype(kind.dtype), kind.shape_for(raw_nbytes)
        if not raw_nbytes:
            return torch.empty(shape, dtype=dtype)
        count, offset = raw_nbytes // kind.itemsize, self._offset[record]
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(shape)

    def codec(self, i: int, field: str = "media") -> str:
        return self._record_kind(self._record(i, field)).codec

    def nbytes(self, i: int, field: str = "media") -> int:
        """Stored bytes."""
        return int(self._nbytes[self._record(i, field)])

    def raw_nbytes(self, i: int, field: str = "media") -> int:
        """Uncompressed bytes."""
        return int(self._raw_nbytes[self._record(i, field)])

    def gather(self, indices: UnitIndices, out: OutputBuffer, field: str = "media", *, threads: int = 1) -> None:
        """Copy the units' records into the rows of `out`, a contiguous numpy array or CPU tensor of shape [k, …].

        A row has the records' dtype and shape, or is their bytes (uint8). Raises ValueError if record sizes differ. Up
        to `threads` threads copy a large batch in parallel.
        """
        self._check_readable(field)
        rows = self._uniform_records(field)
        records = record_numbers(self._catalog, check_unit_indices(indices, len(self)), field, rows)
        flat, nbytes = gather.check_output(self._catalog, records, out, rows)
        self._copy_records(records, flat, nbytes, threads)

    def gather_tensors(self, indices: UnitIndices, *, threads: int = 1) -> dict[str, torch.Tensor]:
        """Stack units of equal layout: for each field that the first unit has, a new tensor of shape [k, …]."""
        import torch

        units = check_unit_indices(indices, len(self))
        tensors = {}
        for field, column in self._columns.items():
            self._check_readable(field)
            first = column[int(units[0])]
            if first == ABSENT:
                continue
            kind = self._raw_record_kind(first)
            shape = kind.shape_for(self._raw_nbytes[first])
            out = tensors[field] = torch.empty((len(units), *shape), dtype=torch_dtype(kind.dtype))
            if (rows := self._uniform_records(field)) is None:
                self.gather(units, out, field, threads=threads)
            else:  # all records of the field are alike, so nothing remains to be checked
                flat = out.view(-1).view(torch.uint8).numpy()
                self._copy_records(self._catalog.fields[field][units], flat, rows.nbytes, threads)
        return tensors

    def check(self, i: int, field: str = "media") -> None:
        """Raise ArenaDamagedError unless the record's bytes match their checksum."""
        check_record(self._folder, self._catalog, self._bytes, self._record(i, field))

    def table(self, name: str) -> NDArray[Any]:
        """A column of the whole dataset, read-only and zero-copy."""
        if name not in self._catalog.tables:
            raise KeyError(f"no table {name!r} in {self.name}; it has {', '.join(self.tables) or 'none'}")
        record = self._catalog.tables[name]
        self._check_record(record)
        return self._record_array(record)

    def verify(self, progress: Progress | None = None) -> None:
        """Check every byte of every file of the arena. Raises ArenaDamagedError with the file's name."""
        total = int(self._catalog.nbytes.sum())
        title, records = f"verifying {self.name}", len(self._offset)
        with (progress or NullSink()).phase(title, items=records, nbytes=total, noun="records") as phase:
            verify_arena(self._folder, phase, should_stop=lambda: False)

    def close(self) -> None:
        """Release the lock. Existing views stay valid."""
        if self._folder.fd < 0:
            return
        self._stop.set()
        self._copy_threads.close()
        if self._verify_thread is not None:
            self._verify_thread.join()
        self._columns.clear()
        self._folder.close()
        if self._on_close is not None:
            self._on_close()

    def _copy_records(self, records: U32, flat: NDArray[np.uint8], nbytes: int, threads: int) -> None:
        if self._always_verify:
            for record in records.tolist():
                self._check_record(record)
        self._copy_threads.copy(self._pages, self._catalog.offset[records], flat, nbytes, threads)

    def _record(self, i: int, field: str) -> int:
        self._check_readable(field)
        self._check_unit(i)
        record = int(self._columns[field][i])
        if record == ABSENT:
            raise KeyError(f"unit {i} ({self.key(i)!r}) has no field {field!r}")
        self._check_record(record)
        return record

    def _check_readable(self, field: str) -> None:
        if self._verification_error is not None:
            raise self._verification_error
        if field not in self._columns:
            assert self._folder.fd >= 0, "this reader is closed"
            raise KeyError(f"no field {field!r} in {self.name}; it has {', '.join(self.fields) or 'none'}")

    def _check_unit(self, i: int) -> None:
        if not 0 <= i < len(self._catalog.keys):
            raise IndexError(f"unit {i} of {len(self)}")

    def _check_record(self, record: int) -> None:
        if self._always_verify:
            check_record(self._folder, self._catalog, self._bytes, record)

    def _record_kind(self, record: int) -> RecordKind:
        return self._record_kind_at(int(self._catalog.kind[record]))

    def _raw_record_kind(self, record: int) -> RecordKind:
        kind = self._record_kind(record)
        if kind.codec != "raw":
            raise ValueError(f"this record is compressed with {kind.codec}; decompress the bytes of view()")
        return kind

    def _record_array(self, record: int) -> NDArray[Any]:
        kind, raw_nbytes = self._raw_record_kind(record), self._raw_nbytes[record]
        count, offset = raw_nbytes // kind.itemsize, self._offset[record]
        return np.frombuffer(self._bytes, numpy_dtype(kind.dtype), count, offset).reshape(kind.shape_for(raw_nbytes))

    def _verify_in_background(self) -> None:
        """Verify in the background at low priority. A read after this raises the error that it found."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            verify_arena(self._folder, NullSink().phase(""), self._stop.is_set)
        except VerificationStopped:
            return
        except ArenaError as error:
            self._verification_error = error
