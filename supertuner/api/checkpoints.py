"""Lists and verifies the checkpoints of runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from supertuner.core.errors import CheckpointError
from supertuner.core.events import NullSink
from supertuner.core.types import JSON
from supertuner.runs.run_reader import open_run
from supertuner.sinks.console import ConsoleSink
from supertuner.sinks.run_folder import RUN_FILE

if TYPE_CHECKING:
    from supertuner.train.checkpoint.load import CheckpointInfo


@dataclass(frozen=True, slots=True)
class CheckpointVerification:
    """The result of reading every byte of a checkpoint."""

    path: Path
    step: int | None
    """None if the checkpoint is damaged."""
    nbytes: int
    trained_parts: Mapping[str, str]
    """Part with trained weights (`adapter.low_noise`) → how many of its keys and layers are known."""
    problems: tuple[str, ...]
    """What is damaged; empty if the checkpoint is intact."""

    def to_dict(self) -> dict[str, JSON]:
        """Everything as JSON values."""
        return {
            "path": str(self.path),
            "step": self.step,
            "nbytes": self.nbytes,
            "trained_parts": dict(self.trained_parts),
            "problems": list(self.problems),
        }


def find(run: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """The checkpoints of a run, oldest first. Only manifests and file sizes are checked; `verify` checks the content.

    Args:
        run: The folder of the run, which may be training.

    Raises:
        RunFolderError: `run` is not the folder of a run.
    """
    from supertuner.train.checkpoint.load import find_checkpoints
    from supertuner.train.checkpoint.manifest import CHECKPOINTS_DIR

    return find_checkpoints(open_run(Path(run)).path / CHECKPOINTS_DIR)


def verify(path: str | os.PathLike[str], *, show_progress: bool = False) -> Iterator[CheckpointVerification]:
    """Verify every byte of checkpoints, load their trained weights and match the keys with the layers of the model.

    Args:
        path: A checkpoint, a folder of checkpoints, or the folder of a run.
        show_progress: Show progress on the console.

    Returns:
        An iterator that verifies one checkpoint at a time, oldest first.

    Raises:
        CheckpointError: `path` is not a folder, or the run has no checkpoints.
    """
    folders = _checkpoint_folders(Path(path))
    return _verify_each(folders, show_progress)


def _verify_each(folders: list[Path], show_progress: bool) -> Iterator[CheckpointVerification]:
    from supertuner.train.checkpoint.load import read_manifest, verify_checkpoint
    from supertuner.train.export.adapter_inspect import inspect_checkpoint

    with ConsoleSink() if show_progress else nullcontext(NullSink()) as progress:
        for folder in folders:
            problems = verify_checkpoint(folder, progress)
            reports = [] if problems else inspect_checkpoint(folder)
            problems += [problem for report in reports for problem in report.problems]
            if problems:
                yield CheckpointVerification(folder, None, 0, {}, tuple(problems))
                continue
            manifest = read_manifest(folder.resolve())
            summaries = {report.part: report.summary for report in reports}
            yield CheckpointVerification(folder, manifest.step, manifest.nbytes, summaries, ())


def _checkpoint_folders(path: Path) -> list[Path]:
    from supertuner.train.checkpoint.load import find_checkpoints

    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give a checkpoint folder or a run folder")
    if not (path / RUN_FILE).is_file():
        return [checkpoint.path for checkpoint in find_checkpoints(path)] or [path]
    folders = [checkpoint.path for checkpoint in find(path)]
    if not folders:
        raise CheckpointError(f"{path} has no checkpoints yet")
    return folders
