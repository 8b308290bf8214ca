"""What the ranks of test_shared_saves.py do: runs with sharded weights, and saves that fail on one rank."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from supertuner.arena.run_context import RunContext
from supertuner.config.sources.launcher import LauncherEnvironment
from supertuner.config.sources.load import load_config
from supertuner.core.errors import CheckpointError
from supertuner.core.events import Event, NoteEvent, NullSink, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.distributed.torch_process_group import open_process_group
from supertuner.distributed.watchdog.heartbeat import Heartbeat
from supertuner.train.checkpoint.async_saver import CheckpointSaver
from supertuner.train.checkpoint.load import find_checkpoints
from supertuner.train.checkpoint.manifest import CHECKPOINTS_DIR
from supertuner.train.run.training_run import TrainingRun
from supertuner.train.setup import open_run
from tests.distributed.runs import run_folder


@dataclass
class SaveObservations:
    """What a rank saw of its saves."""

    errors: list[str] = field(default_factory=list)
    answers: list[tuple[str | None, str]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    """Checkpoints that were whole after each save."""

    def emit(self, event: Event, /) -> None:
        if isinstance(event, WarningEvent | NoteEvent):
            self.messages.append(f"{event.what}: {event.message}")


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """Limit the size of files, as a full disk would."""
    before, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@contextmanager
def a_shared_run(place: LauncherEnvironment, path: Path, found: SaveObservations) -> Iterator[TrainingRun]:
    settings = load_config(path).config
    folder = run_folder(path)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as opened:
        parallel = opened.enter_context(open_process_group(settings.parallel, place, torch.device("cpu"), Heartbeat()))
        context = RunContext(folder, found, NullSink(), HostFacts())
        yield opened.enter_context(open_run(settings, context, process_group=parallel))


def failing(place: LauncherEnvironment, path: Path, bad: int) -> SaveObservations:
    """Three saves: the second is requested, the third scheduled, and one rank cannot write these two."""
    found = SaveObservations()

    def answer(made: Path | None, why: str) -> None:
        found.answers.append((None if made is None else made.name, why))

    with a_shared_run(place, path, found) as run:
        folder = run.context.run_dir / CHECKPOINTS_DIR
        try:
            with CheckpointSaver(run) as saves:
                saves.save()
                saves.wait()
                found.steps.append([one.step for one in find_checkpoints(folder)])
                for due in (False, True):
                    run.step += 1
                    with small_files(2000) if place.rank == bad else ExitStack():
                        if due:
                            saves.save()
                        else:
                            saves.save_on_request(answer if place.rank == 0 else None)
                        while saves._future is not None:
                            saves.report_if_finished()
                    found.steps.append([one.step for one in find_checkpoints(folder)])
        except CheckpointError as error:
            found.errors.append(str(error))
        run.process_group.all_reduce_max([0])
        found.steps.append([one.step for one in find_checkpoints(folder) if one.problem is None])
        found.messages.append(",".join(sorted(os.listdir(folder))))
    return found


def killed(place: LauncherEnvironment, path: Path, bad: int) -> SaveObservations:
    """A save in which one rank is killed before its shard is written."""
    found = SaveObservations()
    with a_shared_run(place, path, found) as run, CheckpointSaver(run) as saves:
        saves.save()
        saves.wait()
        run.step += 1
        if place.rank == bad:
            os.kill(os.getpid(), signal.SIGKILL)
        saves.save()
        saves.wait()
    return found
