"""The tensors of a checkpoint, part by part: whole, or only the rows that a process wants, whoever wrote which.

A part that processes shared out is put together from their files: each has some rows, and together they have all of
them, once. So a run may go on with another number of processes than wrote its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import xxhash

from supertuner.train.checkpoint import tensor_file
from supertuner.train.checkpoint.files import check_digest, check_size, opened, opened_folder
from supertuner.train.checkpoint.manifest import FileFacts, Manifest, damaged

if TYPE_CHECKING:
    from torch import Tensor


class Wanted(NamedTuple):
    """What a process wants of a tensor."""

    shape: tuple[int, ...]
    """Of the whole one. The files cannot know it: where its last rows are lost, a half looks like a whole."""
    rows: range


Rows: TypeAlias = Callable[[str], Wanted | None]
"""Tensor → what is wanted of it, unless it is a single number; None: all of it."""


class Piece(NamedTuple):
    """What one file has of a tensor."""

    file: str
    header_bytes: int
    entry: tensor_file.Entry
    first: int
    """The row of the whole tensor that it begins with."""

    @property
    def end(self) -> int:
        return self.first + (self.entry.shape[0] if self.entry.shape else 0)


class Parts(Mapping[str, dict[str, "Tensor"]]):
    """The tensors of a checkpoint, by part. A part is read, and checked once more, each time it is asked for."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self._manifest = manifest
        self._files = manifest.part_files

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        files = self._files[name]
        if len(files) == 1:
            return self._read(files[0])
        pieces = self.pieces(name)
        with _said(self._path / name):
            whole = {one: tensor_file.empty(_whole(found), found[0].entry) for one, found in pieces.items()}
        places = {(piece.file, one): piece for one, found in pieces.items() for piece in found}
        for file in files:

            def place(entry: tensor_file.Entry, file: str = file) -> Tensor:
                piece = places[file, entry.name]
                return whole[entry.name][piece.first : piece.end] if entry.shape else whole[entry.name]

            self._read(file, place)
        return whole

    def rows(self, name: str, wanted: Rows) -> dict[str, Tensor]:
        """The part with only these rows of its tensors. Nothing but them is read: whoever loaded the checkpoint has
        checked all of it."""
        found = {}
        with _said(self._path / name), opened_folder(self._path) as folder_fd:
            for one, pieces in self.pieces(name).items():
                shape = _whole(pieces)
                want = (wanted(one) if shape else None) or Wanted(shape, range(shape[0] if shape else 1))
                if want.shape != shape:
                    what = f"{one} of {name} ends as {list(shape)}, wanted is {list(want.shape)}"
                    cause = "rows are missing, or it is of another model"
                    raise damaged(self._path / pieces[-1].file, f"{what}: {cause}")
                rows = want.rows
                found[one] = tensor_file.empty((len(rows), *shape[1:]) if shape else (), pieces[0].entry)
                for piece in pieces:
                    self._read_rows(folder_fd, piece, rows, found[one])
        return found

    def _read_rows(self, folder_fd: int, piece: Piece, rows: range, tensor: Tensor) -> None:
        """What a piece has of these rows, to where it belongs in the tensor that holds them."""
        if not piece.entry.shape:
            first, into = 0, tensor
        else:
            begin, end = max(piece.first, rows.start), min(piece.end, rows.stop)
            if begin >= end:
                return
            first, into = begin - piece.first, tensor[begin - rows.start : end - rows.start]
        with opened(folder_fd, self._path / piece.file) as fd:
            tensor_file.read_rows(fd, piece.header_bytes, piece.entry, first, into)

    def is_shared_out(self, name: str) -> bool:
        """Whether its rows are in the files of several processes."""
        return len(self._files[name]) > 1

    def pieces(self, name: str) -> dict[str, list[Piece]]:
        """Tensor → where its rows are, in their order; CheckpointError unless each of them is there once."""
        found: dict[str, list[Piece]] = {}
        with opened_folder(self._path) as folder_fd:
            for file in self._files[name]:
                with _said(self._path / file), opened(folder_fd, self._path / file) as fd:
                    header, entries = tensor_file.read_header(fd, self._manifest.files[file].nbytes)
                    firsts = tensor_file.first_rows(header, entries)
                for entry in entries:
                    found.setdefault(entry.name, []).append(Piece(file, len(header), entry, firsts[entry.name]))
        for one, pieces in found.items():
            pieces.sort(key=lambda piece: (piece.first, piece.end))
            _require_all_rows(self._path, name, one, pieces)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def _read(self, name: str, place: tensor_file.Placing | None = None) -> dict[str, Tensor]:
        file = self._path / name
        with opened_folder(self._path) as folder_fd, opened(folder_fd, file) as fd:
            return _read_file(fd, file, self._manifest.files[name], place)


def _whole(pieces: list[Piece]) -> tuple[int, ...]:
    """The shape of a tensor in pieces."""
    shape = pieces[-1].entry.shape
    return (pieces[-1].end, *shape[1:]) if shape else ()


def _require_all_rows(path: Path, part: str, name: str, pieces: list[Piece]) -> None:
    end = 0
    for number, piece in enumerate(pieces):
        alike = piece.entry.code == pieces[0].entry.code and piece.entry.shape[1:] == pieces[0].entry.shape[1:]
        if not alike or (number and not piece.entry.shape):
            raise damaged(path / piece.file, f"{name} of {part} is another tensor than in {pieces[0].file}")
        if piece.first != end:
            what = f"{name} of {part} goes on with row {piece.first}, wanted is row {end}"
            raise damaged(path / piece.file, what)
        end = piece.end


def _read_file(fd: int, file: Path, facts: FileFacts, place: tensor_file.Placing | None) -> dict[str, Tensor]:
    check_size(fd, file, facts)
    digest = xxhash.xxh3_128()
    with _said(file):
        tensors = tensor_file.read_tensors(fd, facts.nbytes, digest.update, place)
    check_digest(file, digest.hexdigest(), facts)
    return tensors


@contextmanager
def _said(file: Path) -> Iterator[None]:
    """What is wrong with a file, or with its size, in our words."""
    try:
        yield
    except tensor_file.Malformed as error:
        raise damaged(file, str(error)) from error
    except MemoryError as error:
        raise damaged(file, f"it does not fit into memory: {error}", "free some memory") from error
