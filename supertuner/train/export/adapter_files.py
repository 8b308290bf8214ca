"""Opens adapter files by their headers, and converts them to other key schemes one tensor at a time.

A file is untrusted: its header is validated before anything in it is used, nothing in it is executed, and no size that
it claims is allocated before the file has proved to be that large. A new file appears completely or not at all, and
replaces another one only if that is requested.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from supertuner.config.families import FAMILIES, expert_names, layers_of
from supertuner.core.durable import sync_folder
from supertuner.core.errors import ModelError
from supertuner.models.adapters.family_layers import FAMILY_LAYERS
from supertuner.models.adapters.keys import AdapterKeyReading, AdapterTensorName, read_keys
from supertuner.models.adapters.keys_convert import (
    OUTDATED_METADATA,
    ConvertedTensor,
    Shape,
    adapter_layers,
    plan_conversion,
)
from supertuner.models.adapters.keys_schemes import ALPHA, LORA_A, KeyScheme
from supertuner.train.checkpoint.manifest import MANIFEST_FILE

if TYPE_CHECKING:
    from torch import Tensor

    from supertuner.train.checkpoint.tensor_file import TensorEntry

CHUNK_BYTES: Final = 8 << 20
SUPERTUNER_KEY: Final = "supertuner"
"""Metadata key of SuperTuner: JSON with the expert, rank and alpha of the training."""
TRAINED_PART_PREFIXES: Final = ("adapter.", "ema.")
"""Prefixes of checkpoint files that contain trained weights."""


@dataclass(frozen=True, eq=False, slots=True)
class AdapterFile:
    """An adapter file as its header describes it."""

    path: Path
    reading: AdapterKeyReading
    entries: Mapping[str, TensorEntry]
    """Key → byte range, dtype and shape of its tensor."""
    data_at: int
    """Offset of the first tensor in the file."""
    metadata: Mapping[str, str]

    @property
    def shapes(self) -> dict[str, Shape]:
        return {key: entry.shape for key, entry in self.entries.items()}

    @property
    def expert(self) -> str | None:
        """The expert that it is for, by its metadata or else its file name; for files whose keys do not contain it."""
        expert = self.supertuner_metadata.get("expert")
        return str(expert) if expert in expert_names() else self.expert_from_file_name

    @property
    def expert_from_file_name(self) -> str | None:
        return next((expert for expert in expert_names() if self.path.stem.endswith(f"_{expert}")), None)

    @property
    def family(self) -> str:
        """The family whose layers it has; ModelError if several families have them."""
        try:
            return self.reading.family
        except ModelError as error:
            raise ModelError(f"{self.path}: {error}") from error

    @property
    def supertuner_metadata(self) -> Mapping[str, object]:
        try:
            value = json.loads(self.metadata.get(SUPERTUNER_KEY, "{}"))
        except (ValueError, RecursionError):
            return {}  # another program uses the same key
        return value if isinstance(value, dict) else {}


def open_adapter(path: Path, family: str | None = None) -> AdapterFile:
    """Open a file by its header; ModelError if it is damaged, or if none of its keys is known.

    If several families have its layers and `family` is None, the file's own metadata decides.
    """
    from supertuner.train.checkpoint.tensor_file import METADATA_KEY, MalformedTensorFileError, read_header

    with _open_adapter_file(path) as fd:
        try:
            header, entries = read_header(fd, os.fstat(fd).st_size)
        except MalformedTensorFileError as error:
            problem = f"{path} is not a .safetensors file, or a damaged one: {error}"
            raise ModelError(f"{problem}; fetch or export it again") from error
    metadata = json.loads(header[8:]).get(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelError(f"{path} is a damaged .safetensors file: its metadata is not an object of texts")
    keys = [entry.name for entry in entries]
    try:
        reading = read_keys(keys, family)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    file = AdapterFile(path, reading, {entry.name: entry for entry in entries}, len(header), metadata)
    family_name = str(file.supertuner_metadata.get("family"))
    own_family = layers_of(family_name) if family_name in FAMILIES else None
    if family is None and len(reading.families) > 1:
        fitting = [own_family] if own_family in reading.families else _families_of_size(file)
        if len(fitting) == 1:
            return replace(file, reading=read_keys(keys, fitting[0]))
    return file


def _families_of_size(file: AdapterFile) -> list[str]:
    """The families of a LoRA, among those with all its layers, that have a published model of its size."""
    layers = [layer for layer in adapter_layers(file.reading) if layer.is_lora and layer.module.endswith("attn.to_q")]
    sizes = {file.entries[layer.keys[LORA_A]].shape[-1] for layer in layers}
    blocks = max((int(number) for layer in layers for number in re.findall(r"\d+", layer.module)), default=0) + 1
    return [
        family
        for family in file.reading.families
        if any(sizes == {width} and blocks <= count for width, count in FAMILY_LAYERS[family].published_sizes)
    ]


def refuse_checkpoint_part(path: Path) -> None:
    """ModelError for a part of a checkpoint: alpha and expert are settings of its run, and not in the file."""
    if path.name.startswith(TRAINED_PART_PREFIXES) and (path.parent / MANIFEST_FILE).is_file():
        raise ModelError(
            f"{path} is a part of a checkpoint and does not contain its alpha, which is a setting of its run; name the "
            f"checkpoint itself: `supertuner adapter export {path.parent} --for PROGRAM`"
        )


def with_expert(file: AdapterFile, expert: str | None) -> AdapterFile:
    """The file with its expert set: from `expert`, its keys, its metadata or its name. ModelError if they disagree."""
    key_experts = [name for name in file.reading.experts if name is not None]
    if key_experts:
        if expert is not None and key_experts != [expert]:
            raise ModelError(f"{file.path}: its keys are for {' and '.join(key_experts)}, not for {expert}")
        return file
    metadata_expert, file_name_expert = file.supertuner_metadata.get("expert"), file.expert_from_file_name
    if expert is not None and metadata_expert in expert_names() and metadata_expert != expert:
        raise ModelError(f"{file.path} was trained for {metadata_expert} by its metadata, not for {expert}")
    if file_name_expert is not None and file_name_expert != (expert or file.expert):
        raise ModelError(
            f"{file.path} is for {file_name_expert} by its name, and for {expert or file.expert} by its metadata or "
            "as requested; an adapter on the wrong expert ruins its images: rename the file"
        )
    resolved = expert or file.expert
    names = {key: AdapterTensorName(resolved, name.module, name.tensor) for key, name in file.reading.names.items()}
    return replace(file, reading=replace(file.reading, names=names)) if resolved is not None else file


def select_expert(file: AdapterFile, expert: str | None) -> AdapterFile:
    """A copy of the description `file` that has only this expert's tensors; no file is written."""
    names = {key: name for key, name in file.reading.names.items() if name.expert == expert}
    return replace(file, reading=replace(file.reading, names=names))


def convert_adapter(
    file: AdapterFile, scheme: KeyScheme, out: Path, *, overwrite: bool = False, family: str | None = None
) -> int:
    """Write the file's adapter in `scheme`; returns the number of tensors. At most one tensor is in memory.

    Unknown keys are dropped: callers must warn of them or refuse the file.
    """
    try:
        pieces = _plan_conversion(file, scheme, family)
    except ModelError as error:
        raise ModelError(f"{file.path} cannot be written as {scheme.name}: {error}") from error
    with _open_adapter_file(file.path) as fd, _create_file(out, overwrite) as out_fd:
        _write_tensor_file(out_fd, fd, file, pieces, converted_metadata(file, scheme))
    return len(pieces)


def converted_metadata(file: AdapterFile, scheme: KeyScheme, **facts: str) -> dict[str, str]:
    """The metadata of the file after its conversion. `facts` are added to those of SuperTuner."""
    conversion = f"{file.reading.scheme.name} to {scheme.name}"
    supertuner_metadata = {**file.supertuner_metadata, "converted": conversion, **facts}
    if not scheme.marks_experts and file.reading.experts[0] is not None:
        supertuner_metadata["expert"] = file.reading.experts[0]
    metadata = {key: text for key, text in file.metadata.items() if key not in OUTDATED_METADATA}
    return {**metadata, "format": "pt", SUPERTUNER_KEY: json.dumps(supertuner_metadata)}


def load_adapter_tensors(file: AdapterFile, scheme: KeyScheme, family: str | None = None) -> dict[str, Tensor]:
    """The tensors that `convert_adapter` would write, in new memory; for training that starts from the file."""
    try:
        pieces = _plan_conversion(file, scheme, family)
    except ModelError as error:
        raise ModelError(f"{file.path} cannot be used: {error}") from error
    with _open_adapter_file(file.path) as fd:
        return {piece.key: _build_tensor(fd, file, piece) for piece in pieces}


def _plan_conversion(file: AdapterFile, scheme: KeyScheme, family: str | None) -> list[ConvertedTensor]:
    if family is None:  # diffusers' layer names are the same in all families that the file may be for
        family = file.reading.families[0] if scheme.naming == "diffusers" else file.family
    return plan_conversion(file.reading, file.shapes, read_alphas(file), file.metadata, scheme, family)


def read_alphas(file: AdapterFile) -> dict[str, float]:
    """Key of each alpha → its value."""
    alpha_keys = [key for key, name in file.reading.names.items() if name.tensor == ALPHA]
    alphas = {}
    with _open_adapter_file(file.path) as fd:
        for key in alpha_keys:
            tensor = _read_tensor(fd, file, key)
            value = float(tensor.double().reshape(())) if tensor.numel() == 1 else math.nan
            if not math.isfinite(value):
                raise ModelError(f"{file.path}: {key} is an alpha, and not one finite number")
            alphas[key] = value
    return alphas


def iter_tensors(file: AdapterFile, keys: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield (key, tensor) one by one, each tensor in new memory."""
    with _open_adapter_file(file.path) as fd:
        for key in keys:
            yield key, _read_tensor(fd, file, key)


# ── bytes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _write_tensor_file(
    out_fd: int, fd: int, file: AdapterFile, pieces: Sequence[ConvertedTensor], metadata: Mapping[str, str]
) -> None:
    from supertuner.train.checkpoint.tensor_file import DTYPE_BY_CODE, METADATA_KEY

    header: dict[str, object] = {METADATA_KEY: dict(metadata)}
    order = sorted(
        pieces, key=lambda piece: (-DTYPE_BY_CODE[_dtype_code(file, piece)][1], piece.key)
    )  # large elements first: each tensor is aligned
    end = 0
    for piece in order:
        begin, end = end, end + math.prod(piece.shape) * DTYPE_BY_CODE[_dtype_code(file, piece)][1]
        header[piece.key] = {
            "dtype": _dtype_code(file, piece),
            "shape": list(piece.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    _write_fully(out_fd, len(text).to_bytes(8, "little") + text)
    for piece in order:
        for chunk in _tensor_chunks(fd, file, piece):
            _write_fully(out_fd, chunk)


def _dtype_code(file: AdapterFile, piece: ConvertedTensor) -> str:
    if piece.blocks:
        codes = {file.entries[block.source].dtype_code for block in piece.blocks}
        if len(codes) > 1:
            raise ModelError(f"{file.path}: {piece.key} would be assembled from {' and '.join(sorted(codes))}")
        return codes.pop()
    return "F32" if piece.source is None else file.entries[piece.source].dtype_code


def _tensor_chunks(fd: int, file: AdapterFile, piece: ConvertedTensor) -> Iterator[bytes | memoryview]:
    if piece.source is None or piece.scale != 1.0:
        yield _byte_view(_build_tensor(fd, file, piece))
        return
    entry = file.entries[piece.source]
    begin, end = entry.begin, entry.end
    if piece.rows is not None:
        row = (end - begin) // max(1, entry.shape[0])
        begin, end = begin + piece.rows[0] * row, begin + piece.rows[1] * row
    for at in range(begin, end, CHUNK_BYTES):
        yield _read_exactly(fd, file, file.data_at + at, min(CHUNK_BYTES, end - at))


def _build_tensor(fd: int, file: AdapterFile, piece: ConvertedTensor) -> Tensor:
    import torch

    from supertuner.train.checkpoint.tensor_file import DTYPE_BY_CODE

    if piece.blocks:
        joined = torch.zeros(piece.shape, dtype=getattr(torch, DTYPE_BY_CODE[_dtype_code(file, piece)][0]))
        for block in piece.blocks:
            part = _scale(_read_tensor(fd, file, block.source), block.scale)
            joined[block.row : block.row + part.shape[0], block.column : block.column + part.shape[1]] = part
        return joined
    if piece.source is None:
        return torch.tensor(piece.fill_value, dtype=torch.float32)
    tensor = _read_tensor(fd, file, piece.source)
    if piece.rows is not None:
        tensor = tensor[slice(*piece.rows)].clone()
    return _scale(tensor, piece.scale).reshape(piece.shape)


def _scale(tensor: Tensor, scale: float) -> Tensor:
    """`tensor` times `scale`: in place if its dtype is fp32 or wider, else computed in fp32 and rounded once."""
    if scale == 1.0:
        return tensor
    if tensor.dtype.itemsize >= 4 and tensor.is_floating_point():
        return tensor.mul_(scale)
    return tensor.float().mul_(scale).to(tensor.dtype)


def _byte_view(tensor: Tensor) -> memoryview:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _read_tensor(fd: int, file: AdapterFile, key: str) -> Tensor:
    import torch

    from supertuner.train.checkpoint.tensor_file import DTYPE_BY_CODE

    entry = file.entries[key]
    tensor = torch.empty(entry.shape, dtype=getattr(torch, DTYPE_BY_CODE[entry.dtype_code][0]))
    content, at = _byte_view(tensor), file.data_at + entry.begin
    while content:
        count = os.preadv(fd, [content], at)
        if not count:
            raise ModelError(f"{file.path} became shorter while it was read")
        content, at = content[count:], at + count
    return tensor


def _read_exactly(fd: int, file: AdapterFile, at: int, nbytes: int) -> bytes:
    content = os.pread(fd, nbytes, at)
    while len(content) < nbytes:
        more = os.pread(fd, nbytes - len(content), at + len(content))
        if not more:
            raise ModelError(f"{file.path} became shorter while it was read")
        content += more
    return content


def _write_fully(fd: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


@contextmanager
def _open_adapter_file(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ModelError(f"{path} cannot be opened: {error.strerror}; name a .safetensors file") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ModelError(f"{path} is not a file; name a .safetensors file")
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _create_file(path: Path, overwrite: bool) -> Iterator[int]:
    """Yield a descriptor of a hidden file; afterwards it is at `path`, durably. Replaces only with `overwrite`."""
    if path.exists() and not overwrite:
        raise ModelError(f"{path} exists already; name another file with `out`, or replace it with `overwrite`")
    if path.is_dir():
        raise ModelError(f"{path} is a folder; name a file with `out`")
    if not path.parent.is_dir():
        raise ModelError(f"{path} cannot be written: there is no folder {path.parent}; create it, or name another file")
    hidden = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield fd
        os.fsync(fd)
        if overwrite:
            os.replace(hidden, path)
        else:
            publish_file(hidden, path)
    finally:
        os.close(fd)
        hidden.unlink(missing_ok=True)
    sync_folder(path.parent)


def publish_file(hidden: Path, path: Path) -> None:
    """Rename a hidden file to `path`; ModelError if `path` exists. The hidden name may stay as a second link."""
    try:
        os.link(hidden, path)  # unlike a rename, it fails if another process was faster
    except FileExistsError as error:
        raise ModelError(f"{path} was written by another process in the meantime; it stays as it is") from error
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        os.rename(hidden, path)  # the file system has no hard links
