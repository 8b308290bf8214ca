"""Reads and writes named tensors as safetensors files: equal tensors give equal bytes; sizes are known beforehand.

The safetensors library is not used because a checkpoint needs four things: the exact size beforehand, only one tensor
in memory at a time, a checksum while writing, and tensors read into memory with torch's own alignment, with which CPU
kernels compute the same bits as before. The library reads these files, and this module reads the library's.

A file may contain only some rows of tensors whose other rows are in other files. Its metadata then says which, with the
keys of torch's distributed checkpoints, whose tools read such files too.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeGuard

from supertuner.core.bulk_io import read_all

if TYPE_CHECKING:
    from torch import Tensor

DTYPE_BY_CODE = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "C64": ("complex64", 8),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""dtype name of the format → (torch's name, bytes per element)."""
METADATA_KEY = "__metadata__"
SHARDING_KEY, OFFSETS_KEY = "DCP_SHARDING_INFO", "saved_offsets"
"""torch's metadata keys: JSON of tensor → offset in the whole tensor, per dimension."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
HEADER_ALIGNMENT = 64
CHUNK_BYTES = 8 << 20


AllocateTensor: TypeAlias = "Callable[[TensorEntry], Tensor]"
"""Returns the tensor that an entry is read into."""


class MalformedTensorFileError(ValueError):
    """Not a valid file of this format. The caller, which knows the file's name, turns it into an error for users."""


class TensorEntry(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype_code: str
    shape: tuple[int, ...]
    begin: int
    """Byte offset after the header."""
    end: int


@dataclass(frozen=True, eq=False, slots=True)
class TensorFileLayout:
    """A file to be written: its header, then the tensors in this order, without gaps."""

    header: bytes
    tensors: tuple[Tensor, ...]
    nbytes: int

    def chunks(self) -> Iterator[memoryview]:
        """The file's content, in order. Tensors come to the CPU one by one."""
        yield memoryview(self.header)
        yield from self.tensor_chunks()

    def tensor_chunks(self) -> Iterator[memoryview]:
        """The tensors alone."""
        for tensor in self.tensors:
            yield from _byte_chunks(tensor)


def plan_tensor_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> TensorFileLayout:
    """Largest elements first, then by name: so each tensor begins at a multiple of its element's size."""
    codes = {name: _dtype_code(name, tensor) for name, tensor in tensors.items()}
    order = sorted(tensors, key=lambda name: (-DTYPE_BY_CODE[codes[name]][1], name))
    entries: dict[str, object] = {METADATA_KEY: {"format": "pt", **(metadata or {})}}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].numel() * DTYPE_BY_CODE[codes[name]][1]
        entries[name] = {"dtype": codes[name], "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % HEADER_ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return TensorFileLayout(header, tuple(tensors[name] for name in order), len(header) + end)


def row_offsets_metadata(row_offsets: Mapping[str, int], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Metadata of a file that contains, of each tensor, the rows from its offset on; without offset, all rows."""
    offsets = {
        name: {OFFSETS_KEY: [row_offsets.get(name, 0), *[0] * (len(tensor.shape) - 1)] if len(tensor.shape) else []}
        for name, tensor in sorted(tensors.items())
    }
    return {SHARDING_KEY: json.dumps(offsets, ensure_ascii=False, separators=(",", ":"))}


def parse_row_offsets(header: bytes, entries: Iterable[TensorEntry]) -> dict[str, int]:
    """Tensor → index of its first row in the whole tensor, from the header; 0 if the header does not say it."""
    sharding = _parse_sharding(header)
    row_offsets = {}
    for entry in entries:
        offsets = sharding.get(entry.name, {OFFSETS_KEY: [0] * len(entry.shape)})
        offsets = offsets.get(OFFSETS_KEY) if isinstance(offsets, dict) else None
        if not _are_sizes(offsets) or len(offsets) != len(entry.shape) or any(offsets[1:]):
            problem = f"{entry.name!r} begins at {offsets!r} of the whole tensor"
            raise MalformedTensorFileError(f"{problem}; only parts made of rows are supported")
        row_offsets[entry.name] = offsets[0] if offsets else 0
    return row_offsets


def read_tensors(
    fd: int, nbytes: int, on_bytes: Callable[[memoryview], object], allocate: AllocateTensor | None = None
) -> dict[str, Tensor]:
    """Every tensor of an open file of `nbytes`, on the CPU, in new memory or in the contiguous tensors of `allocate`.

    `on_bytes` receives all bytes of the file, in order.
    """
    header, entries = read_header(fd, nbytes)
    on_bytes(memoryview(header))
    tensors = {}
    for entry in entries:
        tensors[entry.name] = empty_tensor(entry.shape, entry) if allocate is None else allocate(entry)
        for chunk in _read_chunks(fd, tensors[entry.name], len(header) + entry.begin):
            on_bytes(chunk)
    return tensors


def read_rows(fd: int, header_bytes: int, entry: TensorEntry, first_row: int, target: Tensor) -> None:
    """Read rows of a tensor from `first_row` on, as many as `target` has."""
    row_bytes = math.prod(entry.shape[1:]) * DTYPE_BY_CODE[entry.dtype_code][1]
    for _ in _read_chunks(fd, target, header_bytes + entry.begin + first_row * row_bytes):
        pass


def empty_tensor(shape: Sequence[int], entry: TensorEntry) -> Tensor:
    """An uninitialised CPU tensor of the entry's dtype. MemoryError if it does not fit."""
    import torch

    try:
        return torch.empty(tuple(shape), dtype=getattr(torch, DTYPE_BY_CODE[entry.dtype_code][0]))
    except RuntimeError as error:  # torch raises it when memory is short
        nbytes = math.prod(shape) * DTYPE_BY_CODE[entry.dtype_code][1]
        raise MemoryError(f"{nbytes} bytes for {entry.name}") from error


def read_header(fd: int, nbytes: int) -> tuple[bytes, list[TensorEntry]]:
    """(raw header, its entries in file order). MalformedTensorFileError unless all of it is consistent."""
    if nbytes < 8:
        raise MalformedTensorFileError(f"{nbytes} bytes are too few for a header")
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > min(nbytes - 8, MAX_HEADER_BYTES):
        raise MalformedTensorFileError(f"its header claims {length} bytes in a file of {nbytes}")
    header = os.pread(fd, 8 + length, 0)
    if len(header) != 8 + length:
        raise MalformedTensorFileError("it ends inside its header")
    entries = sorted(_parse_entries(header[8:]), key=lambda entry: (entry.begin, entry.end))
    end = 0
    for entry in entries:
        if entry.begin != end:
            raise MalformedTensorFileError(f"{entry.name!r} begins at {entry.begin}, the one before it ends at {end}")
        end = entry.end
    if end != nbytes - len(header):
        raise MalformedTensorFileError(f"its tensors take {end} bytes, the file has {nbytes - len(header)} for them")
    return header, entries


def _parse_entries(text: bytes) -> Iterator[TensorEntry]:
    try:
        header = json.loads(text, object_pairs_hook=_without_duplicates)
    except MalformedTensorFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise MalformedTensorFileError(f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise MalformedTensorFileError("its header is not an object")
    for name, facts in header.items():
        if name != METADATA_KEY:
            yield _parse_entry(name, facts)


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The JSON object. A key that occurs twice means different tensors to different readers."""
    merged = dict(pairs)
    if len(merged) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise MalformedTensorFileError(f"its header has the key {twice!r} twice")
    return merged


def _parse_sharding(header: bytes) -> dict[str, object]:
    """The sharding metadata of a validated header; empty if it has none."""
    metadata = json.loads(header[8:]).get(METADATA_KEY)
    text = metadata.get(SHARDING_KEY) if isinstance(metadata, dict) else None
    if text is None:
        return {}
    try:
        sharding = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedTensorFileError(f"its {SHARDING_KEY} is not JSON ({error})") from error
    if not isinstance(sharding, dict):
        raise MalformedTensorFileError(f"its {SHARDING_KEY} is not an object")
    return sharding


def _parse_entry(name: str, facts: object) -> TensorEntry:
    if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
        raise MalformedTensorFileError(f"{name!r} is not described by dtype, shape and data_offsets")
    code, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    if not isinstance(code, str) or code not in DTYPE_BY_CODE:
        raise MalformedTensorFileError(f"{name!r} has dtype {code!r}; supported are {', '.join(DTYPE_BY_CODE)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise MalformedTensorFileError(f"{name!r} has shape {shape!r} and data_offsets {offsets!r}")
    if math.prod(max(1, size) for size in shape) >= 1 << 60:  # more elements than torch can count, even if a size is 0
        raise MalformedTensorFileError(f"{name!r} has shape {shape}, which is too large for a tensor")
    if offsets[1] - offsets[0] != math.prod(shape) * DTYPE_BY_CODE[code][1]:
        raise MalformedTensorFileError(f"{name!r}: {code} of shape {shape} does not take the bytes {offsets}")
    return TensorEntry(name, code, tuple(shape), *offsets)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) <= 64 and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _dtype_code(name: str, tensor: Tensor) -> str:
    codes = {f"torch.{torch_name}": code for code, (torch_name, _) in DTYPE_BY_CODE.items()}
    code, kind = codes.get(str(tensor.dtype)), type(tensor).__name__
    assert code is not None, f"{name} is {tensor.dtype}, which the format does not support"
    assert kind in ("Tensor", "Parameter"), f"{name} is a {kind}: save its plain inner tensors"
    assert name != METADATA_KEY and not tensor.is_meta and not tensor.is_sparse, f"{name} has no bytes to save"
    return code


def _byte_chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The tensor's bytes, in order; a copy only if it is on another device or not contiguous."""
    import torch

    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    for begin in range(0, len(content), CHUNK_BYTES):
        yield content[begin : begin + CHUNK_BYTES]


def _read_chunks(fd: int, tensor: Tensor, offset: int) -> Iterator[memoryview]:
    """Read the bytes from `offset` on into a contiguous tensor; yields each chunk after it is read."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu", "the bytes would be read into a copy"
    for chunk in _byte_chunks(tensor):
        done = read_all(fd, chunk, offset)
        if done < len(chunk):
            raise MalformedTensorFileError(f"it ends at byte {offset + done}")
        yield chunk
        offset += len(chunk)
