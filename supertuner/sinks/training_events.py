"""The measurement events of a training run: their names and figures, and sinks that filter them.

    train/begin      training starts or resumes: current and final position
    train/step       one optimizer step
    train/rates      distribution of the learning rates of single weights, per expert (Automagic)
    train/held_out   the loss on held-out samples at fixed noise levels, per expert and level
    train/samples    a folder of samples was written
    train/end        training stopped: position and elapsed time
    memory           the machine's memory at a step: the figures that this machine provides

A figure that is NaN or infinite is None, because JSON has no such numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from supertuner.core.events import Event, MeasurementEvent, Sink
from supertuner.core.types import JSON

TRAIN_BEGIN, TRAIN_STEP, TRAIN_RATES = "train/begin", "train/step", "train/rates"
TRAIN_HELD_OUT, TRAIN_SAMPLES, TRAIN_END = "train/held_out", "train/samples", "train/end"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The figures of one optimizer step; a function of the run alone, not of when or how fast it ran."""

    step: int
    """Optimizer steps done, this one included."""
    samples: int
    """Samples consumed, this window's included."""
    window: int
    """Samples in this window."""
    expert: str
    """The expert that this step trained."""
    loss: float
    """Mean over the window's samples."""
    grad_norm: float | None
    """Before clipping; None where it is not computed."""
    rate: float
    """Learning rate of this step."""


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """A held-out loss."""

    expert: str | None
    """None: the mean over all experts."""
    sigma: float | None
    """Noise level; None: the mean over the levels."""
    loss: float


def train_begin_event(*, step: int, steps: int, samples: int, samples_total: int) -> MeasurementEvent:
    """Training starts or resumes after `step` of `steps` optimizer steps and `samples` of `samples_total` samples."""
    figures = {"step": step, "steps": steps, "samples": samples, "samples_total": samples_total}
    return MeasurementEvent(TRAIN_BEGIN, figures)


def train_step_event(record: StepRecord, *, seconds: float, waited_s: float) -> MeasurementEvent:
    """An optimizer step was done. `seconds` is the time of the whole window, of which `waited_s` was spent waiting for
    its batches."""
    figures: dict[str, JSON] = {
        "step": record.step,
        "samples": record.samples,
        "samples_in_window": record.window,
        "loss": finite_or_none(record.loss),
        "grad_norm": finite_or_none(record.grad_norm),
        "rate": finite_or_none(record.rate),
        "expert": record.expert,
        "seconds": seconds,
        "samples_per_s": record.window / seconds if seconds > 0 else None,
        "waited_s": waited_s,
    }
    return MeasurementEvent(TRAIN_STEP, figures)


def train_rates_event(step: int, experts: Mapping[str, Mapping[str, float]]) -> MeasurementEvent:
    """For each expert with learning rates of single weights: the mean and the quantiles of the rates, by name."""
    finite = {expert: {name: finite_or_none(rate) for name, rate in rates.items()} for expert, rates in experts.items()}
    rows = [{"expert": expert, **rates} for expert, rates in finite.items()]
    return MeasurementEvent(TRAIN_RATES, {"step": step, "rows": rows})


def train_held_out_event(step: int, rows: Sequence[HeldOutLoss]) -> MeasurementEvent:
    figures = [{"expert": row.expert, "level": row.sigma, "loss": finite_or_none(row.loss)} for row in rows]
    return MeasurementEvent(TRAIN_HELD_OUT, {"step": step, "rows": figures})


def train_samples_event(*, step: int, folder: Path, grid: Path, video: Path | None, weights: str) -> MeasurementEvent:
    """The samples of `step` were written to `folder`; `grid` is a picture of all, `video` a video if they are
    videos."""
    files: dict[str, JSON] = {"path": str(folder), "grid": str(grid), "film": None if video is None else str(video)}
    return MeasurementEvent(TRAIN_SAMPLES, {"step": step, **files, "weights": weights})


def train_end_event(*, step: int, samples: int, seconds: float) -> MeasurementEvent:
    return MeasurementEvent(TRAIN_END, {"step": step, "samples": samples, "seconds": seconds})


def finite_or_none(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def held_out_losses(figures: Mapping[str, JSON]) -> list[HeldOutLoss]:
    """The held-out losses of a `train/held_out` event, without those that are not finite."""
    losses = []
    for row in _rows(figures):
        expert, level, loss = row["expert"], row["level"], row["loss"]
        if isinstance(loss, float):
            sigma = level if isinstance(level, float) else None
            losses.append(HeldOutLoss(None if expert is None else str(expert), sigma, loss))
    return losses


def rate_scalars(figures: Mapping[str, JSON]) -> dict[str, float]:
    """The figures of a `train/rates` event by the tags of TensorBoard and wandb."""
    named = ((f"rates/{row['expert']}/{name}", rate) for row in _rows(figures) for name, rate in row.items())
    return {tag: rate for tag, rate in named if isinstance(rate, float)}


def memory_scalars(figures: Mapping[str, JSON]) -> dict[str, float]:
    """The numeric figures of a `memory` event by the tags of TensorBoard and wandb."""
    return {
        f"memory/{name}": value
        for name, value in figures.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _rows(figures: Mapping[str, JSON]) -> Sequence[Mapping[str, JSON]]:
    return cast("Sequence[Mapping[str, JSON]]", figures["rows"])


class EveryNStepsSink:
    """Passes on every `every_steps`-th `train/step` event, and all other events."""

    def __init__(self, sink: Sink, every_steps: int) -> None:
        self._sink = sink
        self._every_steps = every_steps

    def emit(self, event: Event, /) -> None:
        if isinstance(event, MeasurementEvent) and event.what == TRAIN_STEP:
            step = event.figures["step"]
            if isinstance(step, int) and step % self._every_steps:
                return
        self._sink.emit(event)


class WithoutStepsSink:
    """Passes on all events except `train/step`, which losses.jsonl stores."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def emit(self, event: Event, /) -> None:
        if not (isinstance(event, MeasurementEvent) and event.what == TRAIN_STEP):
            self._sink.emit(event)
