"""The figures of a training run: their names, what is in them, and who gets how many of them.

    train/begin      where training begins or goes on, and where it ends
    train/step       one optimizer step
    train/rates      how the learning rates of single weights are spread, per expert, where weights have their own
    train/held_out   the loss on held-out samples at fixed noise levels, per expert and level
    train/samples    a folder of samples was written
    train/end        where training stopped, and how long it took
    memory           the machine's memory at a step: whatever figures this machine gives

A figure that is not a number is None: it cannot be written to JSON, and a display says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from supertuner.core.events import Event, Measured, Sink
from supertuner.core.types import JSON

BEGIN, STEP, HELD_OUT, SAMPLES, END = "train/begin", "train/step", "train/held_out", "train/samples", "train/end"
RATES = "train/rates"


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One row of the held-out loss."""

    expert: str | None
    """None: the mean over all experts."""
    level: float | None
    """None: the mean over the levels."""
    loss: float


def began(*, step: int, steps: int, samples: int, samples_total: int) -> Measured:
    """Training begins or goes on after `step` of `steps` optimizer steps and `samples` of `samples_total` samples."""
    return Measured(BEGIN, {"step": step, "steps": steps, "samples": samples, "samples_total": samples_total})


def stepped(
    *,
    step: int,
    samples: int,
    samples_in_window: int,
    loss: float,
    grad_norm: float | None,
    rate: float,
    expert: str,
    seconds: float,
    waited_s: float,
) -> Measured:
    """`step` optimizer steps are done (the first is 1), with `samples` samples; `rate` is the learning rate."""
    return Measured(
        STEP,
        {
            "step": step,
            "samples": samples,
            "samples_in_window": samples_in_window,
            "loss": finite(loss),
            "grad_norm": finite(grad_norm),
            "rate": finite(rate),
            "expert": expert,
            "seconds": seconds,
            "samples_per_s": samples_in_window / seconds if seconds > 0 else None,
            "waited_s": waited_s,
        },
    )


def measured_rates(step: int, experts: Mapping[str, Mapping[str, float]]) -> Measured:
    """Figures of the rates of an expert's weights by name (mean, quantiles), for each expert that has such rates."""
    rows = [
        {"expert": expert, **{name: finite(rate) for name, rate in rates.items()}} for expert, rates in experts.items()
    ]
    return Measured(RATES, {"step": step, "rows": rows})


def measured_held_out(step: int, rows: Sequence[HeldOut]) -> Measured:
    figures = [{"expert": row.expert, "level": row.level, "loss": finite(row.loss)} for row in rows]
    return Measured(HELD_OUT, {"step": step, "rows": figures})


def sampled(*, step: int, folder: Path, grid: Path, film: Path | None, weights: str) -> Measured:
    """`folder` holds the samples of `step`, `grid` is their picture, and `film` moves if they are videos."""
    files: dict[str, JSON] = {"path": str(folder), "grid": str(grid), "film": None if film is None else str(film)}
    return Measured(SAMPLES, {"step": step, **files, "weights": weights})


def ended(*, step: int, samples: int, seconds: float) -> Measured:
    return Measured(END, {"step": step, "samples": samples, "seconds": seconds})


def finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def rows_of(figures: Mapping[str, JSON]) -> list[HeldOut]:
    """The held-out losses of a `train/held_out` that are numbers."""
    rows = figures["rows"]
    assert isinstance(rows, Sequence)
    found = []
    for row in rows:
        assert isinstance(row, Mapping)
        if isinstance(row["loss"], float):
            level = row["level"]
            found.append(HeldOut(_name(row["expert"]), level if isinstance(level, float) else None, row["loss"]))
    return found


def rate_values(figures: Mapping[str, JSON]) -> dict[str, float]:
    """The figures of a `train/rates`, by the names they have where figures are drawn."""
    rows = figures["rows"]
    assert isinstance(rows, Sequence)
    found = {}
    for row in rows:
        assert isinstance(row, Mapping)
        found.update({f"rates/{row['expert']}/{name}": rate for name, rate in row.items() if isinstance(rate, float)})
    return found


def memory_values(figures: Mapping[str, JSON]) -> dict[str, float]:
    """The figures of a `memory` that are numbers, by the names they have where figures are drawn."""
    return {
        f"memory/{name}": value
        for name, value in figures.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _name(value: JSON) -> str | None:
    return None if value is None else str(value)


class Thinned:
    """Passes on one optimizer step in `every_steps`, and everything else."""

    def __init__(self, sink: Sink, every_steps: int) -> None:
        self._sink = sink
        self._every = every_steps

    def emit(self, event: Event, /) -> None:
        if isinstance(event, Measured) and event.what == STEP:
            step = event.figures["step"]
            if isinstance(step, int) and step % self._every:
                return
        self._sink.emit(event)


class WithoutSteps:
    """Passes on everything but optimizer steps: for a sink whose run keeps them in a log of their own."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def emit(self, event: Event, /) -> None:
        if not (isinstance(event, Measured) and event.what == STEP):
            self._sink.emit(event)
