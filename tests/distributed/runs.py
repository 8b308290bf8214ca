"""Complete runs on several ranks: real configurations, images and caches, and faults of one rank in the middle."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from supertuner.api.session import open_session
from supertuner.api.training import train_in_session
from supertuner.arena.run_context import RunContext
from supertuner.config.sources.launcher import LauncherEnvironment
from supertuner.config.sources.load import load_config
from supertuner.core.errors import SuperTunerError
from supertuner.core.events import Event, MeasurementEvent, NoteEvent, NullSink, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.data.ordering.micro_batches import MicroBatch
from supertuner.distributed.torch_process_group import TorchProcessGroup
from supertuner.models.spec import Tensors
from supertuner.sinks.training_events import TRAIN_STEP
from supertuner.train.setup import open_run
from tests.train.runs import config, pictures

STEPS = 8


def a_run(folder: Path, name: str, ranks: int, **changed: Any) -> Path:
    """A configuration with windows of 4 samples on any number of ranks: two experts, without dropout, whose random
    numbers differ between ranks."""
    data = folder / "data"
    if not data.exists():
        pictures(data / "train", 6)
        pictures(data / "held_out", 2, first=6)
    blocks: dict[str, Any] = {
        "adapter": {"rank": 2, "dropout": 0.0},
        "train": {"batch_size": 1, "max_steps": STEPS, "gradient_accumulation_steps": 4 // ranks},
        "gh200_optimizations": {"enable_batch_size_rampup": False},
        "validation": {"at_start": False, "at_end": False, "every_steps": None, "inference_steps": 1},
        "report": {"tensorboard": False},
        "checkpoints": {"every_steps": 0, "keep": 2},
        "cache_config": {"cache_dir": str(folder / "cache")},
    }
    for block, values in changed.items():
        blocks[block] = {**blocks.get(block, {}), **values}
    return config(folder, name, **blocks)


def losses(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "losses.jsonl").read_text().splitlines()]


@dataclass
class RankRunResult:
    """How a rank's run ended, and its messages."""

    step: int = 0
    samples: int = 0
    stopped_by: str | None = None
    error: str | None = None
    messages: list[str] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)


class ActingSink:
    """A sink that calls a function once, after a step."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self._step, self._action = step, action
        self.messages: list[str] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, MeasurementEvent) and event.what == TRAIN_STEP and event.figures["step"] == self._step:
            self._action()
        if isinstance(event, NoteEvent | WarningEvent):
            self.messages.append(f"{event.what}: {event.message}")


def train(place: LauncherEnvironment, path: Path, rank: int = -1, step: int = 0, signal: int = 0) -> RankRunResult:
    """Do what `supertuner train` does, as one of several ranks; `rank` sends itself a signal after a step."""

    def action() -> None:
        if place.rank == rank:
            os.kill(os.getpid(), signal)

    doing = ActingSink(step, action)
    with open_session(load_config(path), place) as work:
        done = train_in_session(work, extra_sink=doing)
    return RankRunResult(done.steps, done.samples, done.stopped_by, None, doing.messages)


def request(place: LauncherEnvironment, path: Path, step: int, kinds: tuple[str, ...]) -> RankRunResult:
    """Train, with a request to the run after a step."""

    def action() -> None:
        if place.rank == 1:
            for kind in kinds:
                (run_folder(path) / "requests" / f"ask-{kind}.json").write_text(json.dumps({"kind": kind}))

    doing = ActingSink(step, action)
    with open_session(load_config(path), place) as work:
        done = train_in_session(work, extra_sink=doing)
    return RankRunResult(done.steps, done.samples, done.stopped_by, None, doing.messages)


def run_folder(path: Path) -> Path:
    tree = json.loads(path.read_text())
    return Path(tree["run"]["output_dir"]) / tree["run"]["name"]


class NanSampleSource:
    """Encoded samples of which one is NaN."""

    def __init__(self, inner: Any, position: int) -> None:
        self._inner, self._position = inner, position

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def latents(self, micro: MicroBatch) -> Tensors:
        found = dict(self._inner.latents(micro))
        rows = torch.from_numpy(micro.draws.position == self._position)
        found["latents"] = found["latents"].clone()
        found["latents"][rows] = float("nan")
        return found


def train_on_nan_sample(group: TorchProcessGroup, path: Path, position: int) -> RankRunResult:
    """Train until a sample is NaN."""
    from supertuner.train.loop import train as loop

    doing = ActingSink(0, lambda: None)
    with ExitStack() as opened:
        loaded = load_config(path)
        folder = run_folder(path)
        folder.mkdir(parents=True, exist_ok=True)
        context = RunContext(folder, doing, NullSink(), HostFacts())
        run = opened.enter_context(open_run(loaded.config, context, process_group=group))
        run.collator = replace(run.collator, encoded=NanSampleSource(run.collator.encoded, position))
        error = None
        try:
            loop(run)
        except SuperTunerError as problem:
            error = str(problem)
        weights = {
            f"{expert_state.expert.name}.{name}": parameter.detach().numpy().copy()
            for expert_state in run.expert_states
            for name, parameter in expert_state.parameters.items()
        }
        name = run.collator.sample_name(position)
    return RankRunResult(run.step, run.samples_consumed, None, error, [name, *doing.messages], weights)


def other(group: TorchProcessGroup, path: Path, setting: str) -> str:
    """Open a run whose configuration differs on rank 1; returns the error message."""
    folder = run_folder(path)
    folder.mkdir(parents=True, exist_ok=True)
    sets = [setting] if group.rank == 1 and setting else []
    try:
        with open_run(load_config(path, sets=sets).config, RunContext.silent(folder), process_group=group):
            return "begun"
    except SuperTunerError as error:
        return str(error)
