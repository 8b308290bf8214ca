"""Samples of a model in training: each prompt with each seed, through the family's own pipeline, into a folder.

    samples/step-00000040/
        prompt-00-seed-0.png        a picture; of a video an .mp4, and .frames.png: its first, middle and last frame
        grid.png                    all of them, labelled; grid.mp4 too if they are videos
        samples.json                what they were made of, and the SHA-256 of every file

The run is not changed by one bit: random states, modes and gradients are afterwards what they were. Nothing in the
folder depends on the moment, so the same weights give the same bytes.
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

from supertuner.core.durable import write_bytes
from supertuner.core.events import Measured, Progress
from supertuner.core.types import JSON
from supertuner.models.adapters.attach import Trained, applied
from supertuner.models.spec import Sampler, SampleRequest
from supertuner.plan.sample_requests import SamplePlan
from supertuner.sinks.drawing import png_bytes
from supertuner.sinks.training import sampled
from supertuner.step.window import Trainee, evaluation_weights
from supertuner.train.checkpoint.atomic_dir import new_folder, writing
from supertuner.train.validation.grid import FilmGrid, Grid, Labels, strip
from supertuner.train.validation.video import first_middle_last, mp4_bytes

FORMAT = 1
FACTS, GRID, FILM = "samples.json", "grid.png", "grid.mp4"


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that samples are made with."""

    label: str = "weights in training"
    """For people: `moving average`, `schedule-free average`."""
    applied: Callable[[], AbstractContextManager[None]] = nullcontext
    """While it is open the modules hold them; afterwards their own, to the bit."""


def evaluated(trainees: Sequence[Trainee], trained: Mapping[str, Trained]) -> Weights:
    """The weights that a run is judged by: averages where there are any, else those in training."""
    pairs = [(trained[one.expert.name], values) for one in trainees if (values := evaluation_weights(one)) is not None]
    if not pairs:
        return Weights()

    @contextmanager
    def lent() -> Iterator[None]:
        with ExitStack() as stack:
            for own, values in pairs:
                stack.enter_context(applied(own, values))
            yield

    return Weights("moving average" if any(one.ema is not None for one in trainees) else "schedule-free average", lent)


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def make_samples(
    plan: SamplePlan,
    sampler: Sampler,
    *,
    run: str,
    step: int,
    modules: Iterable[nn.Module],
    folder: Path,
    progress: Progress,
    weights: Weights | None = None,
) -> Measured:
    """Write the samples of `step` below `folder`; `modules` are those in training. Returns `train/samples`."""
    weights = weights or Weights()
    with (
        new_folder(folder, folder_name(step), _same) as new,
        undisturbed(modules),
        weights.applied(),
        progress.phase(f"samples of step {step}", items=len(plan), noun="samples") as phase,
    ):
        sheet = SampleSheet(new, plan, run, step, weights.label)
        for row, column, request in plan.requests():
            sheet.add(row, column, request, sampler.sample(request))
            phase.advance(1)
        film = sheet.close()
    made = folder / folder_name(step)
    return sampled(step=step, folder=made, grid=made / GRID, film=made / FILM if film else None, weights=weights.label)


def made_ahead(
    plan: SamplePlan, sampler: Sampler, *, step: int, modules: Iterable[nn.Module], progress: Progress, weights: Weights
) -> Sampler:
    """All samples of the plan, made now and held; who writes them out can fail without leaving the model halfway."""
    with (
        undisturbed(modules),
        weights.applied(),
        progress.phase(f"computing samples of step {step}", items=len(plan), noun="samples") as phase,
    ):
        held = []
        for _, _, request in plan.requests():
            held.append(sampler.sample(request))
            phase.advance(1)
    return _Held(iter(held))


@dataclass(frozen=True, slots=True)
class _Held:
    """Samples that are there already, in the order of their plan."""

    frames: Iterator[NDArray[np.uint8]]

    def sample(self, request: SampleRequest) -> NDArray[np.uint8]:
        return next(self.frames)


@contextmanager
def undisturbed(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Look, and leave no trace: random states, train and eval modes are afterwards what they were; no gradients."""
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
    """The files of one validation, written as samples come."""

    def __init__(self, folder: Path, plan: SamplePlan, run: str, step: int, weights: str) -> None:
        self._folder = folder
        self._plan = plan
        self._facts: dict[str, JSON] = {"format": FORMAT, "run": run, "step": step, "weights": weights}
        self._labels = _labels(plan, run, step, weights)
        self._grid: Grid | None = None
        self._film: FilmGrid | None = None
        self._samples: list[dict[str, JSON]] = []
        self._hashes: dict[str, str] = {}

    def add(self, row: int, column: int, request: SampleRequest, frames: NDArray[np.uint8]) -> None:
        assert frames.ndim == 4 and frames.shape[3] == 3 and frames.dtype == np.uint8, (frames.shape, frames.dtype)
        shown = first_middle_last(frames)
        self._begin(frames, len(shown))
        assert self._grid is not None
        self._grid.put(row, column, shown)
        if self._film is not None:
            self._film.put(row, column, list(frames))
        name = f"prompt-{row:02d}-seed-{request.seed}"
        self._samples.append({**_request_facts(request, frames, self._plan), "files": self._write(name, frames)})

    def close(self) -> bool:
        """Write the grids and `samples.json`; whether there is a film."""
        assert self._grid is not None, "a plan has a prompt and a seed"
        self._keep(GRID, png_bytes(self._grid.picture()))
        if self._film is not None:
            self._keep(FILM, mp4_bytes(self._film.frames(), self._plan.fps))
        facts = {**self._facts, "samples": self._samples, "sha256": self._hashes}
        text = json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        with writing(self._folder):
            write_bytes(self._folder / FACTS, text.encode(errors="backslashreplace"))
        return self._film is not None

    def _begin(self, frames: NDArray[np.uint8], shown: int) -> None:
        """The sheets are as large as the first sample makes them."""
        if self._grid is None:
            _, height, width, _ = frames.shape
            self._grid = Grid(self._labels, width, height, shown)
            if len(frames) > 1:
                self._film = FilmGrid(self._labels, width, height)

    def _write(self, name: str, frames: NDArray[np.uint8]) -> list[str]:
        if len(frames) == 1:
            return [self._keep(f"{name}.png", png_bytes(Image.fromarray(frames[0])))]
        strips = png_bytes(Image.fromarray(strip(first_middle_last(frames))))
        return [
            self._keep(f"{name}.mp4", mp4_bytes(iter(frames), self._plan.fps)),
            self._keep(f"{name}.frames.png", strips),
        ]

    def _keep(self, name: str, content: bytes) -> str:
        with writing(self._folder):
            write_bytes(self._folder / name, content)
        self._hashes[name] = hashlib.sha256(content).hexdigest()
        return name


def _labels(plan: SamplePlan, run: str, step: int, weights: str) -> Labels:
    size = plan.size
    frames = f", {size.frames} frames" if size.frames > 1 else ""
    note = f"{weights}; {size.width}×{size.height}{frames}; {plan.inference_steps} inference steps, "
    note += f"guidance {plan.guidance_scale:g}"
    if plan.negative_prompt:
        note += f", not: {plan.negative_prompt}"
    return Labels(f"{run}, step {step}", note, plan.prompts, plan.seeds)


def _request_facts(request: SampleRequest, frames: NDArray[np.uint8], plan: SamplePlan) -> dict[str, JSON]:
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


def _same(there: Path, new: Path) -> bool:
    """Whether a folder holds what the new one holds: the same facts, and files that are still what the facts say."""
    if not (there / FACTS).is_file() or (there / FACTS).read_bytes() != (new / FACTS).read_bytes():
        return False
    hashes = json.loads((new / FACTS).read_bytes())["sha256"]
    files = {name: there / name for name in hashes}
    return all(f.is_file() and hashlib.sha256(f.read_bytes()).hexdigest() == hashes[n] for n, f in files.items())
