"""Finds, verifies and loads checkpoints: every file is checked against the manifest before anything in it is used.

Nothing here changes a file. A damaged checkpoint is named in the error, and stays as it is. Parts that several ranks
wrote are assembled from their files, of which each has some rows; so a run may resume with another number of ranks than
wrote its checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import xxhash

from supertuner.core.errors import CheckpointError
from supertuner.core.events import NullSink, Progress
from supertuner.core.types import JSON
from supertuner.train.checkpoint import manifest as manifests
from supertuner.train.checkpoint import tensor_file

if TYPE_CHECKING:
    from torch import Tensor


class WantedRows(NamedTuple):
    """The rows of a tensor that a rank reads."""

    shape: tuple[int, ...]
    """Expected shape of the whole tensor. Files do not contain it: missing last rows would go unnoticed."""
    rows: range


RowSelector: TypeAlias = Callable[[str], WantedRows | None]
"""Tensor name → the rows to read; None: all of them. Not called for scalars."""


class TensorPiece(NamedTuple):
    """The rows of a tensor that one file contains."""

    file: str
    header_bytes: int
    entry: tensor_file.TensorEntry
    first_row: int
    """Index of its first row in the whole tensor."""

    @property
    def end_row(self) -> int:
        return self.first_row + (self.entry.shape[0] if self.entry.shape else 0)


class CheckpointParts(Mapping[str, dict[str, "Tensor"]]):
    """Part → its tensors. Each access reads the part from disk, and verifies its checksum again."""

    def __init__(self, path: Path, manifest: manifests.CheckpointManifest) -> None:
        self._path, self._manifest, self._files = path, manifest, manifest.part_files

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        files = self._files[name]
        if len(files) == 1:
            return self._read_file(files[0])
        tensors: dict[str, Tensor] = {}
        pieces_by_key: dict[tuple[str, str], TensorPiece] = {}
        with _as_checkpoint_error(self._path / name):
            for tensor_name, pieces in self.pieces(name).items():
                tensors[tensor_name] = tensor_file.empty_tensor(_full_shape(pieces), pieces[0].entry)
                pieces_by_key |= {(piece.file, tensor_name): piece for piece in pieces}
        for file in files:

            def allocate(entry: tensor_file.TensorEntry, file: str = file) -> Tensor:
                piece = pieces_by_key[file, entry.name]
                return tensors[entry.name][piece.first_row : piece.end_row] if entry.shape else tensors[entry.name]

            self._read_file(file, allocate)
        return tensors

    def read_rows(self, name: str, select_rows: RowSelector) -> dict[str, Tensor]:
        """Only these rows of a part's tensors. Nothing else is read: `load_checkpoint` has verified the checksums."""
        tensors = {}
        with _as_checkpoint_error(self._path / name), manifests.open_folder(self._path) as folder_fd:
            for tensor_name, pieces in self.pieces(name).items():
                shape = _full_shape(pieces)
                all_rows = WantedRows(shape, range(shape[0] if shape else 1))
                wanted_shape, rows = (select_rows(tensor_name) if shape else None) or all_rows
                if wanted_shape != shape:
                    problem = f"{tensor_name} of {name} has the shape {list(shape)}, not {list(wanted_shape)}"
                    cause = "rows are missing, or it belongs to another model"
                    raise manifests.damaged_checkpoint(self._path / pieces[-1].file, f"{problem}: {cause}")
                own_shape = (len(rows), *shape[1:]) if shape else ()
                tensors[tensor_name] = tensor_file.empty_tensor(own_shape, pieces[0].entry)
                for piece in pieces:
                    self._read_rows(folder_fd, piece, rows, tensors[tensor_name])
        return tensors

    def _read_rows(self, folder_fd: int, piece: TensorPiece, rows: range, tensor: Tensor) -> None:
        """Read those of these rows that a piece contains, into their place in `tensor`."""
        if not piece.entry.shape:
            first_row, target = 0, tensor
        else:
            begin, end = max(piece.first_row, rows.start), min(piece.end_row, rows.stop)
            if begin >= end:
                return
            first_row, target = begin - piece.first_row, tensor[begin - rows.start : end - rows.start]
        with manifests.open_file(folder_fd, self._path / piece.file) as fd:
            tensor_file.read_rows(fd, piece.header_bytes, piece.entry, first_row, target)

    def is_sharded(self, name: str) -> bool:
        """Whether several ranks wrote the rows of this part."""
        return len(self._files[name]) > 1

    def pieces(self, name: str) -> dict[str, list[TensorPiece]]:
        """Tensor → the pieces with its rows, in order. CheckpointError unless each row is there exactly once."""
        pieces_by_tensor: dict[str, list[TensorPiece]] = {}
        with manifests.open_folder(self._path) as folder_fd:
            for file in self._files[name]:
                with _as_checkpoint_error(self._path / file), manifests.open_file(folder_fd, self._path / file) as fd:
                    header, entries = tensor_file.read_header(fd, self._manifest.files[file].nbytes)
                    row_offsets = tensor_file.parse_row_offsets(header, entries)
                for entry in entries:
                    piece = TensorPiece(file, len(header), entry, row_offsets[entry.name])
                    pieces_by_tensor.setdefault(entry.name, []).append(piece)
        for tensor_name, pieces in pieces_by_tensor.items():
            pieces.sort(key=lambda piece: (piece.first_row, piece.end_row))
            _require_all_rows(self._path, name, tensor_name, pieces)
        return pieces_by_tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def _read_file(self, name: str, allocate: tensor_file.AllocateTensor | None = None) -> dict[str, Tensor]:
        file, facts, digest = self._path / name, self._manifest.files[name], xxhash.xxh3_128()
        with manifests.open_folder(self._path) as folder_fd, manifests.open_file(folder_fd, file) as fd:
            manifests.check_size(fd, file, facts)
            with _as_checkpoint_error(file):
                tensors = tensor_file.read_tensors(fd, facts.nbytes, digest.update, allocate)
            manifests.check_digest(file, digest.hexdigest(), facts)
        return tensors


def _full_shape(pieces: list[TensorPiece]) -> tuple[int, ...]:
    """The shape of the tensor that these pieces form."""
    shape = pieces[-1].entry.shape
    return (pieces[-1].end_row, *shape[1:]) if shape else ()


def _require_all_rows(path: Path, part: str, name: str, pieces: list[TensorPiece]) -> None:
    first, end = pieces[0].entry, 0
    for number, (file, _, entry, first_row) in enumerate(pieces):
        same_kind = entry.dtype_code == first.dtype_code and entry.shape[1:] == first.shape[1:]
        if not same_kind or (number and not entry.shape):
            problem = f"{name} of {part} has another dtype or shape than in {pieces[0].file}"
            raise manifests.damaged_checkpoint(path / file, problem)
        if first_row != end:
            problem = f"{name} of {part} continues at row {first_row}, expected row {end}"
            raise manifests.damaged_checkpoint(path / file, problem)
        end = pieces[number].end_row


@contextmanager
def _as_checkpoint_error(file: Path) -> Iterator[None]:
    """Turn errors about a file's format or size into CheckpointError."""
    try:
        yield
    except tensor_file.MalformedTensorFileError as error:
        raise manifests.damaged_checkpoint(file, str(error)) from error
    except MemoryError as error:
        raise manifests.damaged_checkpoint(file, f"it does not fit into memory: {error}", "free some memory") from error


@dataclass(frozen=True, eq=False, slots=True)
class LoadedCheckpoint:
    """A verified checkpoint."""

    path: Path
    step: int
    state: Mapping[str, JSON]
    parts: CheckpointParts

    def read_part(self, name: str, select_rows: RowSelector | None = None) -> dict[str, Tensor]:
        """A part, or some rows of its tensors. CheckpointError if the checkpoint does not have the part."""
        if name not in self.parts:
            problem = f"has no part {name}, it has {', '.join(self.parts) or 'no part at all'}"
            remedy = "it was saved with other settings: resume with those, or start a new run"
            raise CheckpointError(f"{self.path} {problem}; {remedy}")
        return self.parts[name] if select_rows is None else self.parts.read_rows(name, select_rows)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """Summary of a checkpoint's folder, from its manifest and its file sizes; the contents are not read."""

    path: Path
    step: int
    nbytes: int
    parts: tuple[str, ...]
    problem: str | None
    """What is wrong with its manifest or a file's size; None if nothing is wrong."""

    def to_dict(self) -> dict[str, JSON]:
        """Everything as JSON values."""
        return asdict(self) | {"path": str(self.path), "parts": list(self.parts)}


def load_checkpoint(path: Path, progress: Progress | None = None, *, verified: bool = False) -> LoadedCheckpoint:
    """The checkpoint in this folder, with every byte verified; CheckpointError if it is damaged.

    `verified`: another rank of the job has just verified it.
    """
    path = path.resolve()
    manifest = read_manifest(path)
    for problem in () if verified else _content_problems(path, manifest, progress):
        raise problem
    return LoadedCheckpoint(path, manifest.step, _read_state(path), CheckpointParts(path, manifest))


def verify_checkpoint(path: Path, progress: Progress | None = None) -> list[str]:
    """All problems of the checkpoint in this folder; an empty list if it is intact."""
    path = path.resolve()
    try:
        manifest = read_manifest(path)
        problems = list(_content_problems(path, manifest, progress)) or list(_format_problems(path, manifest))
    except CheckpointError as error:
        problems = [error]
    return [str(error) for error in problems]


def find_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """The checkpoints in a folder, oldest first. Only manifests are read."""
    steps = {name: step for name in entry_names(folder) if (step := manifests.parse_checkpoint_name(name)) is not None}
    return [_inspect(folder / name, step) for name, step in sorted(steps.items(), key=lambda item: item[1])]


def entry_names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []  # there is no checkpoint yet


def read_manifest(path: Path) -> manifests.CheckpointManifest:
    file = path / manifests.MANIFEST_FILE
    manifest = manifests.parse_manifest(manifests.read_json_file(file), file)
    named_step = manifests.parse_checkpoint_name(path.name)
    if named_step is not None and named_step != manifest.step:
        problem = f"the folder's name means step {named_step}, its manifest has step {manifest.step}"
        raise manifests.damaged_checkpoint(path, problem, "rename the folder back")
    return manifest


def _read_state(path: Path) -> dict[str, JSON]:
    file = path / manifests.STATE_FILE
    return manifests.parse_object(manifests.read_json_file(file), file)


def _inspect(path: Path, step: int) -> CheckpointInfo:
    real_path = path.resolve()  # it may be a link to another disk
    try:
        manifest = read_manifest(real_path)
        with manifests.open_folder(real_path) as folder_fd:
            for name, facts in manifest.files.items():
                with manifests.open_file(folder_fd, real_path / name) as fd:
                    manifests.check_size(fd, real_path / name, facts)
    except CheckpointError as error:
        return CheckpointInfo(path, step, 0, (), str(error))
    return CheckpointInfo(path, step, manifest.nbytes, tuple(manifest.part_files), None)


def _content_problems(
    path: Path, manifest: manifests.CheckpointManifest, progress: Progress | None
) -> Iterator[CheckpointError]:
    """Files that are missing, or differ in size or content from the manifest."""
    title, progress = f"checking {path.name}", progress or NullSink()
    with manifests.open_folder(path) as folder_fd, progress.phase(title, nbytes=manifest.nbytes) as phase:
        for name, facts in manifest.files.items():
            try:
                with manifests.open_file(folder_fd, path / name) as fd:
                    manifests.check_size(fd, path / name, facts)
                    manifests.check_content(fd, path / name, facts, phase)
            except CheckpointError as error:
                yield error


def _format_problems(path: Path, manifest: manifests.CheckpointManifest) -> Iterator[CheckpointError]:
    """Files that match the manifest and still are no valid checkpoint files: another program wrote them."""
    try:
        _read_state(path)
    except CheckpointError as error:
        yield error
    parts = CheckpointParts(path, manifest)
    for name in parts:
        try:
            parts.pieces(name)
        except CheckpointError as error:
            yield error
