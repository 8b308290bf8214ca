"""Files of adapters: opened and understood without their tensors, and written anew one tensor at a time.

A file is data from a stranger: its header is checked before anything in it is believed, nothing in it is executed, and
no size that it claims is allocated before the file has proved to be that large. A new file appears whole or not at all,
and never in the place of another unless that was asked for.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from supertuner.core.durable import sync_folder
from supertuner.core.errors import ModelError
from supertuner.models.adapters.keys import Name, Reading, read
from supertuner.models.adapters.keys_convert import OUTDATED, Piece, Shape, planned
from supertuner.models.adapters.keys_modules import SAME_LAYERS
from supertuner.models.adapters.keys_schemes import ALPHA, HIGH, LOW, Scheme
from supertuner.train.checkpoint.manifest import MANIFEST

if TYPE_CHECKING:
    from torch import Tensor

    from supertuner.train.checkpoint.tensor_file import Entry

CHUNK: Final = 8 << 20
OWN: Final = "supertuner"
"""Metadata of ours: JSON with the expert, rank and alpha it was trained with."""
PARTS: Final = ("adapter.", "ema.")
"""What names of a checkpoint's files begin with that hold what is trained."""
ENDINGS: Final = {"_high_noise": HIGH, "_low_noise": LOW}


@dataclass(frozen=True, eq=False, slots=True)
class AdapterFile:
    """A file as its header describes it."""

    path: Path
    reading: Reading
    entries: Mapping[str, Entry]
    """Key → its place, its dtype and its shape."""
    data_at: int
    """Where the first tensor begins."""
    metadata: Mapping[str, str]

    @property
    def shapes(self) -> dict[str, Shape]:
        return {key: entry.shape for key, entry in self.entries.items()}

    @property
    def expert(self) -> str | None:
        """Whose it is, where its keys do not say: by its metadata, else by its name."""
        said = self.own_metadata.get("expert")
        return str(said) if said in ENDINGS.values() else self.expert_of_name

    @property
    def expert_of_name(self) -> str | None:
        return next((expert for end, expert in ENDINGS.items() if self.path.stem.endswith(end)), None)

    @property
    def family(self) -> str:
        """The one whose layers it has; ModelError where they are several's."""
        try:
            return self.reading.family
        except ModelError as error:
            raise ModelError(f"{self.path}: {error}") from error

    @property
    def own_metadata(self) -> Mapping[str, object]:
        try:
            found = json.loads(self.metadata.get(OWN, "{}"))
        except (ValueError, RecursionError):
            return {}  # somebody else's use of the word
        return found if isinstance(found, dict) else {}


def open_adapter(path: Path, family: str | None = None) -> AdapterFile:
    """Understand a file by its header. ModelError says what is wrong with it, or that none of its keys is known.

    Where its layers leave the family open and `family` is not said, the file's own metadata decides.
    """
    from supertuner.train.checkpoint.tensor_file import METADATA, Malformed, read_header

    with _opened(path) as fd:
        try:
            header, entries = read_header(fd, os.fstat(fd).st_size)
        except Malformed as error:
            why = f"{path} is not a .safetensors file, or a damaged one: {error}"
            raise ModelError(f"{why}; fetch or export it again") from error
    metadata = json.loads(header[8:]).get(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelError(f"{path} is a damaged .safetensors file: its metadata is not an object of texts")
    keys = [entry.name for entry in entries]
    try:
        reading = read(keys, family)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    file = AdapterFile(path, reading, {entry.name: entry for entry in entries}, len(header), metadata)
    said = str(file.own_metadata.get("family"))
    own = SAME_LAYERS.get(said, said)
    if family is None and len(reading.families) > 1 and own in reading.families:
        return replace(file, reading=read(keys, own))
    return file


def require_scaled(path: Path) -> None:
    """ModelError for a part of a checkpoint: how strong it is (alpha) and for which expert, its run knows."""
    if path.name.startswith(PARTS) and (path.parent / MANIFEST).is_file():
        raise ModelError(
            f"{path} is a part of a checkpoint and does not say its alpha, which is a setting of its run; for a file, "
            f"train with another run.name, --resume {path.parent} and train.max_steps of its step: that exports it"
        )


def with_expert(file: AdapterFile, expert: str | None) -> AdapterFile:
    """The file with its expert said: by `expert`, by its keys, its metadata or its name. They must agree."""
    marked = [one for one in file.reading.experts if one is not None]
    if marked:
        if expert is not None and marked != [expert]:
            raise ModelError(f"{file.path}: its keys are of {' and '.join(marked)}, not of {expert}")
        return file
    known, called = file.own_metadata.get("expert"), file.expert_of_name
    if expert is not None and known in ENDINGS.values() and known != expert:
        raise ModelError(f"{file.path} says that it was trained for {known}, not for {expert}")
    if called is not None and called != (expert or file.expert):
        raise ModelError(
            f"{file.path} is called a file of {called}, and is one of {expert or file.expert} by its metadata or by "
            "--expert; an adapter on the wrong expert ruins what it draws: give it its right name"
        )
    found = expert or file.expert
    names = {key: Name(found, name.module, name.tensor) for key, name in file.reading.names.items()}
    return replace(file, reading=replace(file.reading, names=names)) if found is not None else file


def of_expert(file: AdapterFile, expert: str | None) -> AdapterFile:
    """Only that expert's part of the file."""
    names = {key: name for key, name in file.reading.names.items() if name.expert == expert}
    return replace(file, reading=replace(file.reading, names=names))


def convert(file: AdapterFile, scheme: Scheme, out: Path, *, overwrite: bool = False, family: str | None = None) -> int:
    """Write the file's adapter in `scheme`; the number of tensors written. No more than one tensor is in memory.

    Keys that are not understood are not in the new file: whoever calls has told so, or refused.
    """
    try:
        pieces = _planned(file, scheme, family)
    except ModelError as error:
        raise ModelError(f"{file.path} cannot be written as {scheme.name}: {error}") from error
    own = {**file.own_metadata, "converted": f"{file.reading.scheme.name} to {scheme.name}"}
    if not scheme.marks_experts and file.reading.experts[0] is not None:
        own["expert"] = file.reading.experts[0]
    metadata = {key: text for key, text in file.metadata.items() if key not in OUTDATED}
    with _opened(file.path) as fd, _new_file(out, overwrite) as written:
        _write_all(written, fd, file, pieces, {**metadata, "format": "pt", OWN: json.dumps(own)})
    return len(pieces)


def load_as(file: AdapterFile, scheme: Scheme, family: str | None = None) -> dict[str, Tensor]:
    """What `convert` would write, in memory of its own: to go on training from a file, whoever wrote it."""
    try:
        pieces = _planned(file, scheme, family)
    except ModelError as error:
        raise ModelError(f"{file.path} cannot be used: {error}") from error
    with _opened(file.path) as fd:
        return {piece.key: _made(fd, file, piece) for piece in pieces}


def _planned(file: AdapterFile, scheme: Scheme, family: str | None) -> list[Piece]:
    if family is None:  # diffusers' names are the same in all families that the file can be of
        family = file.reading.families[0] if scheme.naming == "diffusers" else file.family
    return planned(file.reading, file.shapes, alpha_values(file), file.metadata, scheme, family)


def alpha_values(file: AdapterFile) -> dict[str, float]:
    """Key of each alpha → its value."""
    wanted = [key for key, name in file.reading.names.items() if name.tensor == ALPHA]
    found = {}
    with _opened(file.path) as fd:
        for key in wanted:
            tensor = _tensor(fd, file, key)
            value = float(tensor.double().reshape(())) if tensor.numel() == 1 else math.nan
            if not math.isfinite(value):
                raise ModelError(f"{file.path}: {key} is not one finite number, which an alpha is")
            found[key] = value
    return found


def tensors(file: AdapterFile, keys: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the file, one after another, each in memory of its own."""
    with _opened(file.path) as fd:
        for key in keys:
            yield key, _tensor(fd, file, key)


# ── bytes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _write_all(out: int, fd: int, file: AdapterFile, pieces: Sequence[Piece], metadata: Mapping[str, str]) -> None:
    from supertuner.train.checkpoint.tensor_file import CODES, METADATA

    described: dict[str, object] = {METADATA: dict(metadata)}
    order = sorted(pieces, key=lambda piece: (-CODES[_code(file, piece)][1], piece.key))  # each aligned to its elements
    end = 0
    for piece in order:
        begin, end = end, end + math.prod(piece.shape) * CODES[_code(file, piece)][1]
        described[piece.key] = {"dtype": _code(file, piece), "shape": list(piece.shape), "data_offsets": [begin, end]}
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    _write(out, len(text).to_bytes(8, "little") + text)
    for piece in order:
        for chunk in _content(fd, file, piece):
            _write(out, chunk)


def _code(file: AdapterFile, piece: Piece) -> str:
    if piece.blocks:
        codes = {file.entries[block.source].code for block in piece.blocks}
        if len(codes) > 1:
            raise ModelError(f"{file.path}: {piece.key} would be put together of {' and '.join(sorted(codes))}")
        return codes.pop()
    return "F32" if piece.source is None else file.entries[piece.source].code


def _content(fd: int, file: AdapterFile, piece: Piece) -> Iterator[bytes | memoryview]:
    if piece.source is None or piece.scale != 1.0:
        yield _bytes_of(_made(fd, file, piece))
        return
    entry = file.entries[piece.source]
    begin, end = entry.begin, entry.end
    if piece.rows is not None:
        row = (end - begin) // max(1, entry.shape[0])
        begin, end = begin + piece.rows[0] * row, begin + piece.rows[1] * row
    for at in range(begin, end, CHUNK):
        yield _read(fd, file, file.data_at + at, min(CHUNK, end - at))


def _made(fd: int, file: AdapterFile, piece: Piece) -> Tensor:
    import torch

    from supertuner.train.checkpoint.tensor_file import CODES

    if piece.blocks:
        made = torch.zeros(piece.shape, dtype=getattr(torch, CODES[_code(file, piece)][0]))
        for block in piece.blocks:
            part = _scaled(_tensor(fd, file, block.source), block.scale)
            made[block.row : block.row + part.shape[0], block.column : block.column + part.shape[1]] = part
        return made
    if piece.source is None:
        return torch.tensor(piece.value, dtype=torch.float32)
    tensor = _tensor(fd, file, piece.source)
    if piece.rows is not None:
        tensor = tensor[slice(*piece.rows)].clone()
    return _scaled(tensor, piece.scale).reshape(piece.shape)


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    """In the place of `tensor`, where its numbers are as exact as the product."""
    if scale == 1.0:
        return tensor
    if tensor.dtype.itemsize >= 4 and tensor.is_floating_point():
        return tensor.mul_(scale)
    return tensor.float().mul_(scale).to(tensor.dtype)


def _bytes_of(tensor: Tensor) -> memoryview:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _tensor(fd: int, file: AdapterFile, key: str) -> Tensor:
    import torch

    from supertuner.train.checkpoint.tensor_file import CODES

    entry = file.entries[key]
    made = torch.empty(entry.shape, dtype=getattr(torch, CODES[entry.code][0]))
    content, at = _bytes_of(made), file.data_at + entry.begin
    while content:
        count = os.preadv(fd, [content], at)
        if not count:
            raise ModelError(f"{file.path} became shorter while it was read")
        content, at = content[count:], at + count
    return made


def _read(fd: int, file: AdapterFile, at: int, nbytes: int) -> bytes:
    content = os.pread(fd, nbytes, at)
    while len(content) < nbytes:
        more = os.pread(fd, nbytes - len(content), at + len(content))
        if not more:
            raise ModelError(f"{file.path} became shorter while it was read")
        content += more
    return content


def _write(fd: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


@contextmanager
def _opened(path: Path) -> Iterator[int]:
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
def _new_file(path: Path, overwrite: bool) -> Iterator[int]:
    """A descriptor to write to; then the file is at `path`, durably. Without `overwrite` nothing is ever replaced."""
    if path.exists() and not overwrite:
        raise ModelError(f"{path} is there already; name another file with --out, or replace it with --force")
    if path.is_dir():
        raise ModelError(f"{path} is a folder; name a file with --out")
    if not path.parent.is_dir():
        raise ModelError(f"{path} cannot be written: there is no folder {path.parent}; make it, or name another file")
    hidden = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield fd
        os.fsync(fd)
        if overwrite:
            os.replace(hidden, path)
        else:
            put(hidden, path)
    finally:
        os.close(fd)
        hidden.unlink(missing_ok=True)
    sync_folder(path.parent)


def put(hidden: Path, path: Path) -> None:
    """Give a file its name, unless there is one of that name. The hidden name may stay."""
    try:
        os.link(hidden, path)  # unlike a rename, refuses where somebody else was faster
    except FileExistsError as error:
        raise ModelError(f"{path} was written by somebody else meanwhile; it is left as it is") from error
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        os.rename(hidden, path)  # a file system without links
