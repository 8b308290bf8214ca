"""Checkpoints as they are found on disk: checked against their manifest before anything in them is used.

`find`, `verify` and `load` change nothing. A checkpoint that is not what was written is named and left as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from supertuner.core.errors import CheckpointError
from supertuner.core.events import Progress, Silence
from supertuner.core.types import JSON
from supertuner.train.checkpoint.files import check_content, check_size, opened, opened_folder
from supertuner.train.checkpoint.manifest import (
    MANIFEST,
    STATE,
    Manifest,
    damaged,
    parse_manifest,
    parse_object,
    read_small,
    step_of,
)
from supertuner.train.checkpoint.parts import Parts, Rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Found", "Loaded", "Parts", "find", "load", "names", "read_manifest", "verify"]


@dataclass(frozen=True, eq=False, slots=True)
class Loaded:
    """A checkpoint that was found whole."""

    path: Path
    step: int
    state: Mapping[str, JSON]
    parts: Parts

    def part(self, name: str, rows: Rows | None = None) -> dict[str, Tensor]:
        """A part that must be there; of its tensors only some rows, if it says which."""
        if name not in self.parts:
            has = ", ".join(self.parts) or "no part at all"
            raise CheckpointError(
                f"{self.path} has no part {name}, it has {has}; it belongs to a run with other settings: "
                "resume it with those, or start a new run"
            )
        return self.parts[name] if rows is None else self.parts.rows(name, rows)


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint's folder at a glance: its manifest was read, the content of its files was not."""

    path: Path
    step: int
    nbytes: int
    parts: tuple[str, ...]
    problem: str | None
    """What is wrong with its manifest, or with a file's size; None if nothing is."""


def load(path: Path, progress: Progress | None = None, *, checked: bool = False) -> Loaded:
    """The checkpoint in this folder, every byte of it checked; CheckpointError if it is not what was written.
    `checked`: another process of the job did that just now."""
    path = path.resolve()
    manifest = read_manifest(path)
    for problem in () if checked else _content_problems(path, manifest, progress or Silence()):
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


def _glance(path: Path, step: int) -> Found:
    real = path.resolve()  # somebody may have moved it to another disk, and left a link
    try:
        manifest = read_manifest(real)
        with opened_folder(real) as folder_fd:
            for name, facts in manifest.files.items():
                with opened(folder_fd, real / name) as fd:
                    check_size(fd, real / name, facts)
    except CheckpointError as error:
        return Found(path, step, 0, (), str(error))
    return Found(path, step, manifest.nbytes, manifest.parts, None)


def _content_problems(path: Path, manifest: Manifest, progress: Progress) -> Iterator[CheckpointError]:
    """Files that are missing, of another size, or of other content than the manifest says."""
    with opened_folder(path) as folder_fd, progress.phase(f"checking {path.name}", nbytes=manifest.nbytes) as phase:
        for name, facts in manifest.files.items():
            try:
                with opened(folder_fd, path / name) as fd:
                    check_size(fd, path / name, facts)
                    check_content(fd, path / name, facts, phase)
            except CheckpointError as error:
                yield error


def _form_problems(path: Path, manifest: Manifest) -> Iterator[CheckpointError]:
    """Files that are as they were written, and still are not what a checkpoint holds: somebody else wrote them."""
    try:
        with opened_folder(path) as folder_fd:
            parse_object(read_small(folder_fd, STATE, path / STATE), path / STATE)
    except CheckpointError as error:
        yield error
    parts = Parts(path, manifest)
    for name in parts:
        try:
            parts.pieces(name)
        except CheckpointError as error:
            yield error
