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
from supertuner.train.checkpoint import tensor_file
from supertuner.train.checkpoint.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    CheckpointManifest,
    FileFacts,
    check_content,
    check_digest,
    check_size,
    damaged_checkpoint,
    open_file,
    open_folder,
    parse_checkpoint_name,
    parse_manifest,
    parse_object,
    read_json_file,
)

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

    def __init__(self, path: Path, manifest: CheckpointManifest) -> None:
        self._path = path
        self._manifest = manifest
        self._files = manifest.part_files

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        files = self._files[name]
        if len(files) == 1:
            return self._read_file(files[0])
        pieces = self.pieces(name)
        with _as_checkpoint_error(self._path / name):
            tensors = {
                tensor: tensor_file.empty_tensor(_full_shape(rows), rows[0].entry) for tensor, rows in pieces.items()
            }
        piece_by_file_and_tensor = {(piece.file, tensor): piece for tensor, rows in pieces.items() for piece in rows}
        for file in files:

            def allocate(entry: tensor_file.TensorEntry, file: str = file) -> Tensor:
                piece = piece_by_file_and_tensor[file, entry.name]
                return tensors[entry.name][piece.first_row : piece.end_row] if entry.shape else tensors[entry.name]

            self._read_file(file, allocate)
        return tensors

    def read_rows(self, name: str, select_rows: RowSelector) -> dict[str, Tensor]:
        """Only these rows of a part's tensors. Nothing else is read: `load_checkpoint` has verified the checksums."""
        tensors = {}
        with _as_checkpoint_error(self._path / name), open_folder(self._path) as folder_fd:
            for tensor_name, pieces in self.pieces(name).items():
                shape = _full_shape(pieces)
                wanted = (select_rows(tensor_name) if shape else None) or WantedRows(
                    shape, range(shape[0] if shape else 1)
                )
                if wanted.shape != shape:
                    problem = f"{tensor_name} of {name} has the shape {list(shape)}, not {list(wanted.shape)}"
                    cause = "rows are missing, or it belongs to another model"
                    raise damaged_checkpoint(self._path / pieces[-1].file, f"{problem}: {cause}")
                rows = wanted.rows
                tensors[tensor_name] = tensor_file.empty_tensor(
                    (len(rows), *shape[1:]) if shape else (), pieces[0].entry
                )
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
        with open_file(folder_fd, self._path / piece.file) as fd:
            tensor_file.read_rows(fd, piece.header_bytes, piece.entry, first_row, target)

    def is_sharded(self, name: str) -> bool:
        """Whether several ranks wrote the rows of this part."""
        return len(self._files[name]) > 1

    def pieces(self, name: str) -> dict[str, list[TensorPiece]]:
        """Tensor → the pieces with its rows, in order. CheckpointError unless each row is there exactly once."""
        pieces_by_tensor: dict[str, list[TensorPiece]] = {}
        with open_folder(self._path) as folder_fd:
            for file in self._files[name]:
                with _as_checkpoint_error(self._path / file), open_file(folder_fd, self._path / file) as fd:
                    header, entries = tensor_file.read_header(fd, self._manifest.files[file].nbytes)
                    row_offsets = tensor_file.parse_row_offsets(header, entries)
                for entry in entries:
                    pieces_by_tensor.setdefault(entry.name, []).append(
                        TensorPiece(file, len(header), entry, row_offsets[entry.name])
                    )
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
        file = self._path / name
        with open_folder(self._path) as folder_fd, open_file(folder_fd, file) as fd:
            return _read_checked(fd, file, self._manifest.files[name], allocate)


def _full_shape(pieces: list[TensorPiece]) -> tuple[int, ...]:
    """The shape of the tensor that these pieces form."""
    shape = pieces[-1].entry.shape
    return (pieces[-1].end_row, *shape[1:]) if shape else ()


def _require_all_rows(path: Path, part: str, name: str, pieces: list[TensorPiece]) -> None:
    end = 0
    for number, piece in enumerate(pieces):
        same_kind = (
            piece.entry.dtype_code == pieces[0].entry.dtype_code and piece.entry.shape[1:] == pieces[0].entry.shape[1:]
        )
        if not same_kind or (number and not piece.entry.shape):
            raise damaged_checkpoint(
                path / piece.file, f"{name} of {part} has another dtype or shape than in {pieces[0].file}"
            )
        if piece.first_row != end:
            problem = f"{name} of {part} continues at row {piece.first_row}, expected row {end}"
            raise damaged_checkpoint(path / piece.file, problem)
        end = piece.end_row


def _read_checked(
    fd: int, file: Path, facts: FileFacts, allocate: tensor_file.AllocateTensor | None
) -> dict[str, Tensor]:
    check_size(fd, file, facts)
    digest = xxhash.xxh3_128()
    with _as_checkpoint_error(file):
        tensors = tensor_file.read_tensors(fd, facts.nbytes, digest.update, allocate)
    check_digest(file, digest.hexdigest(), facts)
    return tensors


@contextmanager
def _as_checkpoint_error(file: Path) -> Iterator[None]:
    """Turn errors about a file's format or size into CheckpointError."""
    try:
        yield
    except tensor_file.MalformedTensorFileError as error:
        raise damaged_checkpoint(file, str(error)) from error
    except MemoryError as error:
        raise damaged_checkpoint(file, f"it does not fit into memory: {error}", "free some memory") from error


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
            available = ", ".join(self.parts) or "no part at all"
            raise CheckpointError(
                f"{self.path} has no part {name}, it has {available}; it was saved with other settings: resume with "
                "those, or start a new run"
            )
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


def load_checkpoint(
    path: Path, progress: Progress | None = None, *, already_verified: bool = False
) -> LoadedCheckpoint:
    """The checkpoint in this folder, with every byte verified; CheckpointError if it is damaged.

    `already_verified`: another rank of the job has just verified it.
    """
    path = path.resolve()
    manifest = read_manifest(path)
    for problem in () if already_verified else _content_problems(path, manifest, progress or NullSink()):
        raise problem
    with open_folder(path) as folder_fd:
        state = parse_object(read_json_file(folder_fd, STATE_FILE, path / STATE_FILE), path / STATE_FILE)
    return LoadedCheckpoint(path, manifest.step, state, CheckpointParts(path, manifest))


def verify_checkpoint(path: Path, progress: Progress | None = None) -> list[str]:
    """All problems of the checkpoint in this folder; an empty list if it is intact."""
    path = path.resolve()
    try:
        manifest = read_manifest(path)
        problems = list(_content_problems(path, manifest, progress or NullSink()))
        if not problems:
            problems = list(_format_problems(path, manifest))
    except CheckpointError as error:
        problems = [error]
    return [str(error) for error in problems]


def find_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """The checkpoints in a folder, oldest first. Only manifests are read."""
    steps = {name: step for name in entry_names(folder) if (step := parse_checkpoint_name(name)) is not None}
    return [_inspect(folder / name, step) for name, step in sorted(steps.items(), key=lambda item: item[1])]


def entry_names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []  # there is no checkpoint yet


def read_manifest(path: Path) -> CheckpointManifest:
    with open_folder(path) as folder_fd:
        manifest = parse_manifest(read_json_file(folder_fd, MANIFEST_FILE, path / MANIFEST_FILE), path / MANIFEST_FILE)
    named_step = parse_checkpoint_name(path.name)
    if named_step is not None and named_step != manifest.step:
        remedy = "rename the folder back"
        raise damaged_checkpoint(
            path, f"the folder's name means step {named_step}, its manifest has step {manifest.step}", remedy
        )
    return manifest


def _inspect(path: Path, step: int) -> CheckpointInfo:
    real_path = path.resolve()  # it may be a link to another disk
    try:
        manifest = read_manifest(real_path)
        with open_folder(real_path) as folder_fd:
            for name, facts in manifest.files.items():
                with open_file(folder_fd, real_path / name) as fd:
                    check_size(fd, real_path / name, facts)
    except CheckpointError as error:
        return CheckpointInfo(path, step, 0, (), str(error))
    return CheckpointInfo(path, step, manifest.nbytes, manifest.parts, None)


def _content_problems(path: Path, manifest: CheckpointManifest, progress: Progress) -> Iterator[CheckpointError]:
    """Files that are missing, or differ in size or content from the manifest."""
    with open_folder(path) as folder_fd, progress.phase(f"checking {path.name}", nbytes=manifest.nbytes) as phase:
        for name, facts in manifest.files.items():
            try:
                with open_file(folder_fd, path / name) as fd:
                    check_size(fd, path / name, facts)
                    check_content(fd, path / name, facts, phase)
            except CheckpointError as error:
                yield error


def _format_problems(path: Path, manifest: CheckpointManifest) -> Iterator[CheckpointError]:
    """Files that match the manifest and still are no valid checkpoint files: another program wrote them."""
    try:
        with open_folder(path) as folder_fd:
            parse_object(read_json_file(folder_fd, STATE_FILE, path / STATE_FILE), path / STATE_FILE)
    except CheckpointError as error:
        yield error
    parts = CheckpointParts(path, manifest)
    for name in parts:
        try:
            parts.pieces(name)
        except CheckpointError as error:
            yield error
