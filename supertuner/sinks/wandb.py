"""A training run at Weights & Biases: the same figures and grids as TensorBoard gets. The package is an extra."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from supertuner.core.errors import SuperTunerError
from supertuner.core.events import MEMORY, Event, Measured
from supertuner.core.types import JSON
from supertuner.sinks.training import HELD_OUT, RATES, SAMPLES, STEP, memory_values, rate_values, rows_of

REMEDY = "pip install 'supertuner[wandb]', or leave report.wandb out"


def require_wandb() -> None:
    """Said before the work begins, not at the first figure."""
    if find_spec("wandb") is None:
        raise SuperTunerError(f"report.wandb is set, and the package wandb is not installed; {REMEDY}")


class Wandb:
    """A sink. A run that goes on is the same run there; figures that it has already are not taken twice."""

    def __init__(self, project: str, name: str, folder: Path, config: Mapping[str, JSON]) -> None:
        require_wandb()
        self._wandb: Any = import_module("wandb")
        self._error: type[Exception] = self._wandb.Error
        try:
            self._run = self._wandb.init(
                project=project, id=run_id(name), name=name, dir=str(folder), config=dict(config), resume="allow"
            )
        except self._error as error:
            raise SuperTunerError(
                f"report.wandb {project!r}: {error}; log in with `wandb login`, or leave it out"
            ) from (error)

    def emit(self, event: Event, /) -> None:
        if not isinstance(event, Measured):
            return
        if event.what == STEP:
            self._log(event.figures, step_values(event.figures))
        elif event.what == HELD_OUT:
            self._log(event.figures, held_out_values(event.figures))
        elif event.what == SAMPLES:
            self._log(event.figures, self._pictures(event.figures))
        elif event.what == MEMORY:
            self._log(event.figures, memory_values(event.figures))
        elif event.what == RATES:
            self._log(event.figures, rate_values(event.figures))

    def close(self) -> None:
        self._run.finish()

    def __enter__(self) -> Wandb:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _log(self, figures: Mapping[str, JSON], values: Mapping[str, object]) -> None:
        self._run.log(dict(values), step=figures["step"])

    def _pictures(self, figures: Mapping[str, JSON]) -> dict[str, object]:
        found = {"samples": self._wandb.Image(str(figures["grid"]))}
        if figures["film"] is not None:
            found["film"] = self._wandb.Video(str(figures["film"]))
        return found


def run_id(name: str) -> str:
    """The run's name without the characters that an id there may not have."""
    return re.sub(r"[/\\\\#?%:]", "-", name)[:128]


def step_values(figures: Mapping[str, JSON]) -> dict[str, object]:
    """A step's figures by the names they have there."""
    names = ("grad_norm", "rate", "samples", "samples_in_window", "samples_per_s", "waited_s")
    values = {f"train/{name}": figures.get(name) for name in names}
    values[f"train/loss/{figures['expert']}"] = figures["loss"]
    return {name: value for name, value in values.items() if value is not None}


def held_out_values(figures: Mapping[str, JSON]) -> dict[str, object]:
    """The same of the held-out loss: means by expert, and each level."""
    return {
        f"held_out/loss/{row.expert or 'all'}" + ("" if row.level is None else f"/{row.level:.2f}"): row.loss
        for row in rows_of(figures)
    }
