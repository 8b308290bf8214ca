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
from supertuner.core.events import NullSink, Progress
from supertuner.core.types import JSON
from supertuner.train.checkpoint.files import check_content, check_size, open_file, open_folder
from supertuner.train.checkpoint.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    CheckpointManifest,
    damaged_checkpoint,
    parse_checkpoint_name,
    parse_manifest,
    parse_object,
    read_json_file,
)
from supertuner.train.checkpoint.parts import CheckpointParts, RowSelector

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CheckpointInfo",
    "CheckpointParts",
    "LoadedCheckpoint",
    "entry_names",
    "find_checkpoints",
    "load_checkpoint",
    "read_manifest",
    "verify_checkpoint",
]


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
