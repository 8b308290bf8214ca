"""Checkpoints as they are found on disk: checked against their manifest before anything in them is used.

`find`, `verify` and `load` change nothing. A checkpoint that is not what was written is named and left as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from supertuner.core.errors import CheckpointError
from supertuner.core.events import Phase, Progress, Silence
from supertuner.core.types import JSON, bytes_text
from supertuner.train import tensor_file
from supertuner.train.checkpoint_format import (
    MANIFEST,
    STATE,
    TENSORS,
    FileFacts,
    Manifest,
    damaged,
    open_regular,
    parse_manifest,
    parse_object,
    read_small,
    step_of,
)

if TYPE_CHECKING:
    from torch import Tensor

READ_BYTES = 4 << 20


class Parts(Mapping[str, dict[str, "Tensor"]]):
    """The tensors of a checkpoint, by part. A part is read, and checked once more, each time it is asked for."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self._manifest = manifest

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        if name not in self._manifest.parts:
            raise KeyError(name)
        file = self._path / (name + TENSORS)
        with opened_folder(self._path) as folder_fd, _opened(folder_fd, file) as fd:
            return _read_part(fd, file, self._manifest.files[file.name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.parts)

    def __len__(self) -> int:
        return len(self._manifest.parts)

    def __contains__(self, name: object) -> bool:
        return name in self._manifest.parts


@dataclass(frozen=True, eq=False, slots=True)
class Loaded:
    """A checkpoint that was found whole."""

    path: Path
    step: int
    state: Mapping[str, JSON]
    parts: Parts

    def part(self, name: str) -> dict[str, Tensor]:
        """A part that must be there."""
        if name not in self.parts:
            has = ", ".join(self.parts) or "no part at all"
            raise CheckpointError(
                f"{self.path} has no part {name}, it has {has}; it belongs to a run with other settings: "
                "resume it with those, or start a new run"
            )
        return self.parts[name]


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint's folder at a glance: its manifest was read, the content of its files was not."""

    path: Path
    step: int
    nbytes: int
    parts: tuple[str, ...]
    problem: str | None
    """What is wrong with its manifest, or with a file's size; None if nothing is."""


def load(path: Path, progress: Progress | None = None) -> Loaded:
    """The checkpoint in this folder, every byte of it checked; CheckpointError if it is not what was written."""
    path = path.resolve()
    manifest = read_manifest(path)
    for problem in _content_problems(path, manifest, progress or Silence()):
        raise problem
    with opened_folder(path) as folder_fd:
        state = parse_object(read_small(folder_fd, STATE, path / STATE), path / STATE)
    return Loaded(path, manifest.step, state, Parts(path, manifest))


def verify(path: Path, progress: Progress | None = None) -> list[str]:
    """Everything that is wrong with the checkpoint in this folder; an empty list if it is whole."""
    path = path.resolve()
    try:
        manifest = read_manifest(path)
        found = list(_content_problems(path, manifest, progress or Silence()))
        if not found:
            found = list(_form_problems(path, manifest))
    except CheckpointError as error:
        found = [error]
    return [str(error) for error in found]


def find(folder: Path) -> list[Found]:
    """The checkpoints of a run's folder of checkpoints, oldest first. No file's content is read but the manifests'."""
    steps = {name: step for name in names(folder) if (step := step_of(name)) is not None}
    return [_glance(folder / name, step) for name, step in sorted(steps.items(), key=lambda item: item[1])]


def names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []  # no checkpoint was saved yet


def read_manifest(path: Path) -> Manifest:
    with opened_folder(path) as folder_fd:
        manifest = parse_manifest(read_small(folder_fd, MANIFEST, path / MANIFEST), path / MANIFEST)
    named = step_of(path.name)
    if named is not None and named != manifest.step:
        remedy = "give the folder its own name back"
        raise damaged(path, f"the folder is named for step {named}, its manifest says {manifest.step}", remedy)
    return manifest


@contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    """The folder itself, so that what is opened in it cannot be elsewhere."""
    try:
        folder_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        what = "it is a link" if path.is_symlink() else str(error.strerror)
        raise damaged(path, f"is not a checkpoint's folder: {what}") from error
    try:
        yield folder_fd
    finally:
        os.close(folder_fd)


def _glance(path: Path, step: int) -> Found:
    real = path.resolve()  # somebody may have moved it to another disk, and left a link
    try:
        manifest = read_manifest(real)
        with opened_folder(real) as folder_fd:
            for name, facts in manifest.files.items():
                with _opened(folder_fd, real / name) as fd:
                    _check_size(fd, real / name, facts)
    except CheckpointError as error:
        return Found(path, step, 0, (), str(error))
    return Found(path, step, manifest.nbytes, manifest.parts, None)


def _content_problems(path: Path, manifest: Manifest, progress: Progress) -> Iterator[CheckpointError]:
    """Files that are missing, of another size, or of other content than the manifest says."""
    with opened_folder(path) as folder_fd, progress.phase(f"checking {path.name}", nbytes=manifest.nbytes) as phase:
        for name, facts in manifest.files.items():
            try:
                with _opened(folder_fd, path / name) as fd:
                    _check_size(fd, path / name, facts)
                    _check_content(fd, path / name, facts, phase)
            except CheckpointError as error:
                yield error


def _form_problems(path: Path, manifest: Manifest) -> Iterator[CheckpointError]:
    """Files that are as they were written, and still are not what a checkpoint holds: somebody else wrote them."""
    with opened_folder(path) as folder_fd:
        for name, facts in manifest.files.items():
            file = path / name
            try:
                if name == STATE:
                    parse_object(read_small(folder_fd, name, file), file)
                else:
                    with _opened(folder_fd, file) as fd:
                        tensor_file.read_header(fd, facts.nbytes)
            except tensor_file.Malformed as error:
                yield damaged(file, str(error))
            except CheckpointError as error:
                yield error


@contextmanager
def _opened(folder_fd: int, file: Path) -> Iterator[int]:
    fd = open_regular(folder_fd, file.name, file)
    try:
        yield fd
    except OSError as error:
        raise damaged(file, f"cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)


def _check_size(fd: int, file: Path, facts: FileFacts) -> None:
    size = os.fstat(fd).st_size
    if size != facts.nbytes:
        raise damaged(file, f"it has {size} bytes, {facts.nbytes} were written")


def _check_content(fd: int, file: Path, facts: FileFacts, phase: Phase) -> None:
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(READ_BYTES, facts.nbytes)))
    at = 0
    while count := os.preadv(fd, [buffer], at) if buffer else 0:
        digest.update(buffer[:count])
        at += count
        phase.advance(nbytes=count)
    _check_digest(file, digest.hexdigest(), facts)


def _read_part(fd: int, file: Path, facts: FileFacts) -> dict[str, Tensor]:
    _check_size(fd, file, facts)
    digest = xxhash.xxh3_128()
    try:
        tensors = tensor_file.read_tensors(fd, facts.nbytes, digest.update)
    except tensor_file.Malformed as error:
        raise damaged(file, str(error)) from error
    except MemoryError as error:
        raise damaged(file, f"its {bytes_text(facts.nbytes)} do not fit into memory", "free some memory") from error
    _check_digest(file, digest.hexdigest(), facts)
    return tensors


def _check_digest(file: Path, checksum: str, facts: FileFacts) -> None:
    if checksum != facts.checksum:
        raise damaged(file, f"it is not what was written: its checksum is {checksum}, written was {facts.checksum}")
