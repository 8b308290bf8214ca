"""The status line of training: step, loss, learning rate, window, expert, samples per second, time left."""

from __future__ import annotations

from collections.abc import Mapping

from supertuner.core.types import JSON
from supertuner.sinks.phase_counters import duration_text, rate_text

SMOOTHING = 0.98
"""Decay of the exponential means."""


class TrainingStatusLine:
    """Collects the figures of each step, and formats the status line when the display is redrawn.

    The time left is the time for the remaining samples at the pace since this session's first step, including
    validations and checkpoints. It counts samples, not steps, because windows may grow.
    """

    def __init__(self, begin_figures: Mapping[str, JSON], now_s: float) -> None:
        self._steps = _int_or_zero(begin_figures.get("steps"))
        self._samples_total = _int_or_zero(begin_figures.get("samples_total"))
        self._step = _int_or_zero(begin_figures.get("step"))
        self._samples = _int_or_zero(begin_figures.get("samples"))
        self._started_s = now_s
        self._ended_s: float | None = None
        self._first_step: tuple[float, int] | None = None
        """(time, samples) after this session's first step."""
        self._last_figures: Mapping[str, JSON] = {}
        self._losses: dict[str, ExponentialMean] = {}
        self._samples_per_s = ExponentialMean()

    def add(self, figures: Mapping[str, JSON], now_s: float) -> None:
        """Add the figures of a step. Called at every step, so it is cheap and draws nothing."""
        self._last_figures = figures
        step, samples, loss, pace = figures["step"], figures["samples"], figures["loss"], figures["samples_per_s"]
        assert isinstance(step, int) and isinstance(samples, int)
        self._step, self._samples = step, samples
        if self._first_step is None:
            self._first_step = now_s, samples
        if isinstance(loss, float):
            expert = str(figures["expert"])
            if expert not in self._losses:
                self._losses[expert] = ExponentialMean()
            self._losses[expert].add(loss)
        if isinstance(pace, float):
            self._samples_per_s.add(pace)

    def end(self, now_s: float) -> None:
        self._ended_s = now_s

    def fraction_done(self) -> float:
        """How much of the run is done, 0 to 1."""
        if self._samples_total:
            return min(1.0, self._samples / self._samples_total)
        return min(1.0, self._step / self._steps) if self._steps else 0.0

    def status_text(self, now_s: float) -> str:
        """`step 40 of 200, loss 0.1234 (last 0.1301), high_noise, rate 1e-04, window 8, 12.3 samples/s, 9 s left`."""
        parts = [f"step {self._step:,}" + (f" of {self._steps:,}" if self._steps else "")]
        if self._last_figures:
            parts += self._figure_texts()
        if self._ended_s is not None:
            parts.append(f"in {duration_text(self._ended_s - self._started_s)}")
        elif (remaining_s := self.seconds_left(now_s)) is not None:
            parts.append(f"{duration_text(remaining_s)} left")
        return ", ".join(parts)

    def seconds_left(self, now_s: float) -> float | None:
        """Time left; None before the second step of this session."""
        if self._first_step is None or not self._samples_total or self._samples <= self._first_step[1]:
            return None
        first_step_s, first_samples = self._first_step
        return (now_s - first_step_s) * (self._samples_total - self._samples) / (self._samples - first_samples)

    def _figure_texts(self) -> list[str]:
        last, expert = self._last_figures, str(self._last_figures["expert"])
        loss = last["loss"]
        smooth = f"{self._losses[expert].value:.4f}" if expert in self._losses else "unknown"
        last_loss = f"last {loss:.4f}" if isinstance(loss, float) else "last not finite"
        rate = last["rate"]
        parts = [f"loss {smooth} ({last_loss})", expert]
        if isinstance(rate, float):
            parts.append(f"rate {rate:.3g}")
        parts.append(f"window {last['samples_in_window']}")
        if self._samples_per_s.weight:
            pace = self._samples_per_s.value
            parts.append(f"{rate_text(pace)} samples/s")
        return parts


class ExponentialMean:
    """An exponential mean with bias correction: for few values it is close to their plain mean."""

    __slots__ = ("_sum", "weight")

    def __init__(self) -> None:
        self._sum = 0.0
        self.weight = 0.0

    def add(self, value: float) -> None:
        self._sum = SMOOTHING * self._sum + value
        self.weight = SMOOTHING * self.weight + 1.0

    @property
    def value(self) -> float:
        return self._sum / self.weight


def _int_or_zero(value: JSON) -> int:
    """A count; 0 if it is missing."""
    return value if isinstance(value, int) else 0
