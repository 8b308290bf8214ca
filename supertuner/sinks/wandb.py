"""Reports a training run to Weights & Biases, with the same figures and grids as TensorBoard. wandb is an extra."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from supertuner.core.closing import CloseOnExit
from supertuner.core.errors import SuperTunerError
from supertuner.core.events import MEMORY_MEASUREMENT, Event, MeasurementEvent
from supertuner.core.types import JSON
from supertuner.sinks import training_events as training

WANDB_REMEDY = "pip install 'supertuner[wandb]', or remove report.wandb"


def require_wandb() -> None:
    """Raise SuperTunerError if wandb is not installed. Called before training starts."""
    if find_spec("wandb") is None:
        raise SuperTunerError(f"report.wandb is set, but the package wandb is not installed; {WANDB_REMEDY}")


class WandbSink(CloseOnExit):
    """A sink. A resumed run continues its wandb run; wandb ignores steps that it has already."""

    def __init__(self, project: str, name: str, folder: Path, config: Mapping[str, JSON]) -> None:
        require_wandb()
        self._wandb: Any = import_module("wandb")
        try:
            self._run = self._wandb.init(
                project=project, id=wandb_run_id(name), name=name, dir=str(folder), config=dict(config), resume="allow"
            )
        except self._wandb.Error as error:
            remedy = "log in with `wandb login`, or remove the setting"
            raise SuperTunerError(f"report.wandb {project!r}: {error}; {remedy}") from error

    def emit(self, event: Event, /) -> None:
        if not isinstance(event, MeasurementEvent):
            return
        converters: Mapping[str, Callable[[Mapping[str, JSON]], Mapping[str, object]]] = {
            training.TRAIN_STEP: step_scalars,
            training.TRAIN_HELD_OUT: held_out_scalars,
            training.TRAIN_SAMPLES: self._sample_media,
            training.TRAIN_RATES: training.rate_scalars,
            MEMORY_MEASUREMENT: training.memory_scalars,
        }
        if event.what in converters:
            self._run.log(dict(converters[event.what](event.figures)), step=event.figures["step"])

    def close(self) -> None:
        self._run.finish()

    def _sample_media(self, figures: Mapping[str, JSON]) -> dict[str, object]:
        media = {"samples": self._wandb.Image(str(figures["grid"]))}
        if figures["film"] is not None:
            media["film"] = self._wandb.Video(str(figures["film"]))
        return media


def wandb_run_id(name: str) -> str:
    """The id of a run at wandb: its name with the characters replaced that an id must not contain."""
    return re.sub(r"[/\\\\#?%:]", "-", name)[:128]


def step_scalars(figures: Mapping[str, JSON]) -> dict[str, object]:
    """The figures of a step by their wandb names."""
    names = ("grad_norm", "rate", "samples", "samples_in_window", "samples_per_s", "waited_s")
    values = {f"train/{name}": figures.get(name) for name in names}
    values[f"train/loss/{figures['expert']}"] = figures["loss"]
    return {name: value for name, value in values.items() if value is not None}


def held_out_scalars(figures: Mapping[str, JSON]) -> dict[str, object]:
    """The held-out losses by their wandb names: means by expert, and each level."""
    return {
        f"held_out/loss/{row.expert or 'all'}" + ("" if row.sigma is None else f"/{row.sigma:.2f}"): row.loss
        for row in training.held_out_losses(figures)
    }
