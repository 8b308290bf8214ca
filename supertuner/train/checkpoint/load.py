"""Checkpoints as they are found on disk: checked against their manifest before anything in them is used.

`find`, `verify` and `load` change nothing. A checkpoint that is not what was written is named and left as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
    """What a process wants of a tensor."""

    shape: tuple[int, ...]
    """Of the whole one. The files cannot know it: where its last rows are lost, a half looks like a whole."""
    rows: range


RowSelector: TypeAlias = Callable[[str], WantedRows | None]
"""Tensor → what is wanted of it, unless it is a single number; None: all of it."""


class TensorPiece(NamedTuple):
    """What one file has of a tensor."""

    file: str
    header_bytes: int
    entry: tensor_file.TensorEntry
    first_row: int
    """The row of the whole tensor that it begins with."""

    @property
    def end_row(self) -> int:
        return self.first_row + (self.entry.shape[0] if self.entry.shape else 0)


class CheckpointParts(Mapping[str, dict[str, "Tensor"]]):
    """The tensors of a checkpoint, by part. A part is read, and checked once more, each time it is asked for."""

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
                one: tensor_file.empty_tensor(_full_shape(found), found[0].entry) for one, found in pieces.items()
            }
        piece_by_file_and_tensor = {(piece.file, one): piece for one, found in pieces.items() for piece in found}
        for file in files:

            def allocate(entry: tensor_file.TensorEntry, file: str = file) -> Tensor:
                piece = piece_by_file_and_tensor[file, entry.name]
                return tensors[entry.name][piece.first_row : piece.end_row] if entry.shape else tensors[entry.name]

            self._read_file(file, allocate)
        return tensors

    def read_rows(self, name: str, select_rows: RowSelector) -> dict[str, Tensor]:
        """The part with only these rows of its tensors. Nothing but them is read: whoever loaded the checkpoint has
        checked all of it."""
        tensors = {}
        with _as_checkpoint_error(self._path / name), open_folder(self._path) as folder_fd:
            for tensor_name, pieces in self.pieces(name).items():
                shape = _full_shape(pieces)
                wanted = (select_rows(tensor_name) if shape else None) or WantedRows(
                    shape, range(shape[0] if shape else 1)
                )
                if wanted.shape != shape:
                    problem = f"{tensor_name} of {name} ends as {list(shape)}, wanted is {list(wanted.shape)}"
                    cause = "rows are missing, or it is of another model"
                    raise damaged_checkpoint(self._path / pieces[-1].file, f"{problem}: {cause}")
                rows = wanted.rows
                tensors[tensor_name] = tensor_file.empty_tensor(
                    (len(rows), *shape[1:]) if shape else (), pieces[0].entry
                )
                for piece in pieces:
                    self._read_rows(folder_fd, piece, rows, tensors[tensor_name])
        return tensors

    def _read_rows(self, folder_fd: int, piece: TensorPiece, rows: range, tensor: Tensor) -> None:
        """What a piece has of these rows, to where it belongs in the tensor that holds them."""
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
        """Whether its rows are in the files of several processes."""
        return len(self._files[name]) > 1

    def pieces(self, name: str) -> dict[str, list[TensorPiece]]:
        """Tensor → where its rows are, in their order; CheckpointError unless each of them is there once."""
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
    """The shape of a tensor in pieces."""
    shape = pieces[-1].entry.shape
    return (pieces[-1].end_row, *shape[1:]) if shape else ()


def _require_all_rows(path: Path, part: str, name: str, pieces: list[TensorPiece]) -> None:
    end = 0
    for number, piece in enumerate(pieces):
        same_kind = (
            piece.entry.dtype_code == pieces[0].entry.dtype_code and piece.entry.shape[1:] == pieces[0].entry.shape[1:]
        )
        if not same_kind or (number and not piece.entry.shape):
            raise damaged_checkpoint(path / piece.file, f"{name} of {part} is another tensor than in {pieces[0].file}")
        if piece.first_row != end:
            problem = f"{name} of {part} goes on with row {piece.first_row}, wanted is row {end}"
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
    """What is wrong with a file, or with its size, in our words."""
    try:
        yield
    except tensor_file.MalformedTensorFileError as error:
        raise damaged_checkpoint(file, str(error)) from error
    except MemoryError as error:
        raise damaged_checkpoint(file, f"it does not fit into memory: {error}", "free some memory") from error


@dataclass(frozen=True, eq=False, slots=True)
class LoadedCheckpoint:
    """A checkpoint that was found whole."""

    path: Path
    step: int
    state: Mapping[str, JSON]
    parts: CheckpointParts

    def read_part(self, name: str, select_rows: RowSelector | None = None) -> dict[str, Tensor]:
        """A part that must be there; of its tensors only some rows, if it says which."""
        if name not in self.parts:
            available = ", ".join(self.parts) or "no part at all"
            raise CheckpointError(
                f"{self.path} has no part {name}, it has {available}; it belongs to a run with other settings: "
                "resume it with those, or start a new run"
            )
        return self.parts[name] if select_rows is None else self.parts.read_rows(name, select_rows)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint's folder at a glance: its manifest was read, the content of its files was not."""

    path: Path
    step: int
    nbytes: int
    parts: tuple[str, ...]
    problem: str | None
    """What is wrong with its manifest, or with a file's size; None if nothing is."""


def load_checkpoint(
    path: Path, progress: Progress | None = None, *, already_verified: bool = False
) -> LoadedCheckpoint:
    """The checkpoint in this folder, every byte of it checked; CheckpointError if it is not what was written.
    `checked`: another process of the job did that just now."""
    path = path.resolve()
    manifest = read_manifest(path)
    for problem in () if already_verified else _content_problems(path, manifest, progress or NullSink()):
        raise problem
    with open_folder(path) as folder_fd:
        state = parse_object(read_json_file(folder_fd, STATE_FILE, path / STATE_FILE), path / STATE_FILE)
    return LoadedCheckpoint(path, manifest.step, state, CheckpointParts(path, manifest))


def verify_checkpoint(path: Path, progress: Progress | None = None) -> list[str]:
    """Everything that is wrong with the checkpoint in this folder; an empty list if it is whole."""
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
    """The checkpoints of a run's folder of checkpoints, oldest first. No file's content is read but the manifests'."""
    steps = {name: step for name in entry_names(folder) if (step := parse_checkpoint_name(name)) is not None}
    return [_inspect(folder / name, step) for name, step in sorted(steps.items(), key=lambda item: item[1])]


def entry_names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []  # no checkpoint was saved yet


def read_manifest(path: Path) -> CheckpointManifest:
    with open_folder(path) as folder_fd:
        manifest = parse_manifest(read_json_file(folder_fd, MANIFEST_FILE, path / MANIFEST_FILE), path / MANIFEST_FILE)
    named_step = parse_checkpoint_name(path.name)
    if named_step is not None and named_step != manifest.step:
        remedy = "give the folder its own name back"
        raise damaged_checkpoint(
            path, f"the folder is named for step {named_step}, its manifest says {manifest.step}", remedy
        )
    return manifest


def _inspect(path: Path, step: int) -> CheckpointInfo:
    real_path = path.resolve()  # somebody may have moved it to another disk, and left a link
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
    """Files that are missing, of another size, or of other content than the manifest says."""
    with open_folder(path) as folder_fd, progress.phase(f"checking {path.name}", nbytes=manifest.nbytes) as phase:
        for name, facts in manifest.files.items():
            try:
                with open_file(folder_fd, path / name) as fd:
                    check_size(fd, path / name, facts)
                    check_content(fd, path / name, facts, phase)
            except CheckpointError as error:
                yield error


def _format_problems(path: Path, manifest: CheckpointManifest) -> Iterator[CheckpointError]:
    """Files that are as they were written, and still are not what a checkpoint holds: somebody else wrote them."""
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
