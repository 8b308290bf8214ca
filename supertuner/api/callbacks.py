"""Callbacks of a training run: they see its steps, validations and checkpoints, and may stop it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supertuner.core.events import Event, MeasurementEvent
from supertuner.core.types import JSON
from supertuner.sinks.training_events import (
    TRAIN_HELD_OUT,
    TRAIN_SAMPLES,
    TRAIN_STEP,
    HeldOutLoss,
    StepRecord,
    held_out_losses,
)


class TrainingControl:
    """Lets a callback stop the run."""

    def __init__(self) -> None:
        self.stop_requested = False

    def stop(self) -> None:
        """Save a checkpoint after the current window, export the weights, and end the run. The same configuration
        resumes it."""
        self.stop_requested = True


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """One validation."""

    step: int
    samples_dir: Path
    """Folder of the samples."""
    held_out: tuple[HeldOutLoss, ...]
    """Held-out losses by expert and noise level, and their means; empty without a held-out dataset."""

    @property
    def loss(self) -> float | None:
        """The mean held-out loss; None without a held-out dataset."""
        return next((row.loss for row in self.held_out if row.expert is None and row.sigma is None), None)

    def to_dict(self) -> dict[str, JSON]:
        rows: list[JSON] = [{"expert": row.expert, "sigma": row.sigma, "loss": row.loss} for row in self.held_out]
        return {"step": self.step, "samples_dir": str(self.samples_dir), "held_out": rows}


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that is on disk."""

    step: int
    path: Path

    def to_dict(self) -> dict[str, JSON]:
        return {"step": self.step, "path": str(self.path)}


class TrainingCallback:
    """Base class: override what is of interest. The training thread calls the methods between two steps.

    An exception of a callback ends the run; its last checkpoint stays valid. In a job of several processes each process
    calls its callbacks for every step, rank 0 also for validations and checkpoints, and a stop on one rank stops all.
    """

    def on_step(self, step: StepRecord, control: TrainingControl) -> None:
        """After each optimizer step."""

    def on_validation(self, validation: ValidationReport, control: TrainingControl) -> None:
        """After each validation, including those that were requested while the run trains."""

    def on_checkpoint(self, checkpoint: SavedCheckpoint, control: TrainingControl) -> None:
        """When a checkpoint is on disk. Checkpoints are written while training goes on: `checkpoint.step` may be
        earlier than the last step."""


class CallbackSink:
    """Calls callbacks for the events of a run."""

    def __init__(self, callbacks: Sequence[TrainingCallback]) -> None:
        self.control = TrainingControl()
        self._callbacks = tuple(callbacks)
        self._held_out: tuple[int, tuple[HeldOutLoss, ...]] = (-1, ())

    def emit(self, event: Event, /) -> None:
        if not isinstance(event, MeasurementEvent):
            return
        if event.what == TRAIN_STEP:
            record = _step_record(event.figures)
            for callback in self._callbacks:
                callback.on_step(record, self.control)
        elif event.what == TRAIN_HELD_OUT:  # comes before the samples of the same validation
            self._held_out = _as_int(event.figures["step"]), tuple(held_out_losses(event.figures))
        elif event.what == TRAIN_SAMPLES:
            step, (held_out_step, rows) = _as_int(event.figures["step"]), self._held_out
            report = ValidationReport(step, Path(str(event.figures["path"])), rows if held_out_step == step else ())
            for callback in self._callbacks:
                callback.on_validation(report, self.control)

    def checkpoint_saved(self, step: int, path: Path) -> None:
        for callback in self._callbacks:
            callback.on_checkpoint(SavedCheckpoint(step, path), self.control)

    def should_stop(self) -> bool:
        return self.control.stop_requested


def _step_record(figures: Mapping[str, Any]) -> StepRecord:
    """The record of a `train/step` event, in which a number that is not finite is None."""
    return StepRecord(
        step=figures["step"],
        samples=figures["samples"],
        window=figures["samples_in_window"],
        expert=figures["expert"],
        loss=math.nan if figures["loss"] is None else figures["loss"],
        grad_norm=figures["grad_norm"],
        rate=math.nan if figures["rate"] is None else figures["rate"],
    )


def _as_int(value: JSON) -> int:
    assert isinstance(value, int), value
    return value
