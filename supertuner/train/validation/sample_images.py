"""Makes samples of a model in training: each prompt with each seed, with the family's own pipeline, into a folder.

    samples/step-00000040/
        prompt-00-seed-0.png        an image; for a video an .mp4, and .frames.png: its first, middle and last frame
        grid.png                    all samples, labelled; grid.mp4 too if they are videos
        samples.json                prompts, seeds and settings of the samples, and the SHA-256 of every file

The run is not changed by one bit: random states, train/eval modes and gradients are restored. Nothing in the folder
depends on the moment, so the same weights give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from supertuner.arena.run_context import RunContext
from supertuner.core.atomic_folder import atomic_folder, explain_write_errors
from supertuner.core.durable import write_bytes, write_json
from supertuner.core.events import MeasurementEvent
from supertuner.core.types import JSON
from supertuner.models.adapters.attach import TrainableExpert, temporary_weights
from supertuner.models.spec import ModelSampler, SampleRequest
from supertuner.plan.sample_requests import ValidationSamplePlan
from supertuner.sinks.drawing import png_bytes
from supertuner.sinks.training_events import train_samples_event
from supertuner.step.train_step import ExpertState, evaluation_weights
from supertuner.train.validation.grid import GridLabels, ImageGrid, VideoGrid, join_frames
from supertuner.train.validation.video import first_middle_last, mp4_bytes

FORMAT_VERSION = 1
FACTS_FILE, GRID_FILE, VIDEO_FILE = "samples.json", "grid.png", "grid.mp4"


@dataclass(frozen=True, slots=True)
class EvaluationWeights:
    """The weights that samples are made with."""

    label: str = "weights in training"
    """For labels: `moving average`, `schedule-free average`."""
    applied: Callable[[], AbstractContextManager[None]] = nullcontext
    """Inside the block the modules hold these weights; afterwards their own again, to the bit."""


def select_evaluation_weights(
    expert_states: Sequence[ExpertState], trainable_experts: Mapping[str, TrainableExpert]
) -> EvaluationWeights:
    """The weights to evaluate: averages if there are any, else the weights in training."""
    pairs = [
        (trainable_experts[expert_state.expert.name], values)
        for expert_state in expert_states
        if (values := evaluation_weights(expert_state)) is not None
    ]
    if not pairs:
        return EvaluationWeights()

    @contextmanager
    def apply_all() -> Iterator[None]:
        with ExitStack() as stack:
            for trainable, values in pairs:
                stack.enter_context(temporary_weights(trainable, values))
            yield

    has_ema = any(expert_state.ema is not None for expert_state in expert_states)
    return EvaluationWeights("moving average" if has_ema else "schedule-free average", apply_all)


def samples_folder_name(step: int) -> str:
    return f"step-{step:08d}"


def make_samples(
    plan: ValidationSamplePlan,
    sampler: ModelSampler,
    context: RunContext,
    *,
    step: int,
    modules: Iterable[nn.Module],
    folder: Path,
    weights: EvaluationWeights | None = None,
) -> MeasurementEvent:
    """Write the samples of `step` below `folder`; `modules` are those in training. Returns a `train/samples` event."""
    weights = weights or EvaluationWeights()
    with (
        atomic_folder(folder, samples_folder_name(step), _is_identical) as new,
        preserve_training_state(modules),
        weights.applied(),
        context.progress.phase(f"samples of step {step}", items=len(plan), noun="generated samples") as phase,
    ):
        sheet = SampleSheet(new, plan, context.run_dir.name, step, weights.label)
        for row, column, request in plan.requests():
            sheet.add(row, column, request, sampler.sample(request))
            phase.advance(1)
        has_video = sheet.close()
    target = folder / samples_folder_name(step)
    video = target / VIDEO_FILE if has_video else None
    return train_samples_event(step=step, folder=target, grid=target / GRID_FILE, video=video, weights=weights.label)


@contextmanager
def preserve_training_state(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside the block no gradients are computed; afterwards random states and train/eval modes are restored."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    states = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for part, training in modes:
            part.training = training


class SampleSheet:
    """The sample files of one validation, written one by one as the samples are made."""

    def __init__(self, folder: Path, plan: ValidationSamplePlan, run: str, step: int | None, weights: str) -> None:
        self._folder, self._plan = folder, plan
        self._facts: dict[str, JSON] = {"format": FORMAT_VERSION, "run": run, "step": step, "weights": weights}
        self._labels = _labels(plan, run, step, weights)
        self._grid: ImageGrid | None = None
        self._video_grid: VideoGrid | None = None
        self._samples: list[dict[str, JSON]] = []
        self._hashes: dict[str, str] = {}

    def add(self, row: int, column: int, request: SampleRequest, frames: NDArray[np.uint8]) -> None:
        assert frames.ndim == 4 and frames.shape[3] == 3 and frames.dtype == np.uint8, (frames.shape, frames.dtype)
        shown = first_middle_last(frames)
        if self._grid is None:  # the first sample determines the size of the sheets
            _, height, width, _ = frames.shape
            self._grid = ImageGrid(self._labels, width, height, len(shown))
            if len(frames) > 1:
                self._video_grid = VideoGrid(self._labels, width, height)
        self._grid.paste(row, column, shown)
        if self._video_grid is not None:
            self._video_grid.add_clip(row, column, list(frames))
        name = f"prompt-{row:02d}-seed-{request.seed}"
        self._samples.append({**_request_facts(request, frames, self._plan), "files": self._write_sample(name, frames)})

    def close(self) -> bool:
        """Write the grids and `samples.json`. Returns whether there is a video."""
        assert self._grid is not None, "a plan has a prompt and a seed"
        self._write_file(GRID_FILE, png_bytes(self._grid.image()))
        if self._video_grid is not None:
            self._write_file(VIDEO_FILE, mp4_bytes(self._video_grid.frames(), self._plan.fps))
        facts: dict[str, JSON] = {**self._facts, "samples": [*self._samples], "sha256": {**self._hashes}}
        with explain_write_errors(self._folder):
            write_json(self._folder / FACTS_FILE, facts)
        return self._video_grid is not None

    def _write_sample(self, name: str, frames: NDArray[np.uint8]) -> list[str]:
        if len(frames) == 1:
            return [self._write_file(f"{name}.png", png_bytes(Image.fromarray(frames[0])))]
        strips = png_bytes(Image.fromarray(join_frames(first_middle_last(frames))))
        return [
            self._write_file(f"{name}.mp4", mp4_bytes(iter(frames), self._plan.fps)),
            self._write_file(f"{name}.frames.png", strips),
        ]

    def _write_file(self, name: str, content: bytes) -> str:
        with explain_write_errors(self._folder):
            write_bytes(self._folder / name, content)
        self._hashes[name] = hashlib.sha256(content).hexdigest()
        return name


def _labels(plan: ValidationSamplePlan, run: str, step: int | None, weights: str) -> GridLabels:
    size = plan.size
    frames = f", {size.frames} frames" if size.frames > 1 else ""
    negative = f", not: {plan.negative_prompt}" if plan.negative_prompt else ""
    steps = f"{plan.inference_steps} inference steps, guidance {plan.guidance_scale:g}{negative}"
    note = f"{weights}; {size.width}×{size.height}{frames}; {steps}"
    title = run if step is None else f"{run}, step {step}"
    return GridLabels(title, note, plan.prompts, plan.seeds)


def _request_facts(request: SampleRequest, frames: NDArray[np.uint8], plan: ValidationSamplePlan) -> dict[str, JSON]:
    return {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "seed": request.seed,
        "width": int(frames.shape[2]),
        "height": int(frames.shape[1]),
        "frames": len(frames),
        "fps": plan.fps if len(frames) > 1 else None,
        "inference_steps": request.inference_steps,
        "guidance_scale": request.guidance_scale,
    }


def _is_identical(existing: Path, new: Path) -> bool:
    """Whether both folders have the same samples.json, and the existing files still have the recorded hashes."""
    if not (existing / FACTS_FILE).is_file() or (existing / FACTS_FILE).read_bytes() != (new / FACTS_FILE).read_bytes():
        return False
    hashes = json.loads((new / FACTS_FILE).read_bytes())["sha256"]
    files = {name: existing / name for name in hashes}
    return all(f.is_file() and hashlib.sha256(f.read_bytes()).hexdigest() == hashes[n] for n, f in files.items())
