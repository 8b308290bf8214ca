"""Training in one line: step, loss, rate, window, expert, samples per second, time left. Cheap to feed."""

from __future__ import annotations

from collections.abc import Mapping

from supertuner.core.types import JSON
from supertuner.sinks.figures import duration_text

SMOOTHING = 0.98
"""Weight of what the smoothed figures were before a step, once there are many."""


class TrainingLine:
    """What is known of a training run, for the display: figures go in at each step, text comes out now and then.

    Time left is what the remaining samples take at the pace since this session's first step, validations and
    checkpoints included: windows grow, so samples are counted and not steps.
    """

    def __init__(self, begin: Mapping[str, JSON], now_s: float) -> None:
        self._steps = _whole(begin.get("steps"))
        self._samples_total = _whole(begin.get("samples_total"))
        self._step = _whole(begin.get("step"))
        self._samples = _whole(begin.get("samples"))
        self._begun_s = now_s
        self._ended_s: float | None = None
        self._first: tuple[float, int] | None = None
        """When this session's first step was done, and with how many samples."""
        self._last: Mapping[str, JSON] = {}
        self._losses: dict[str, Smoothed] = {}
        self._pace = Smoothed()

    def add(self, figures: Mapping[str, JSON], now_s: float) -> None:
        """One step's figures. Called at every step: a few assignments, nothing is drawn."""
        self._last = figures
        step, samples, loss, pace = figures["step"], figures["samples"], figures["loss"], figures["samples_per_s"]
        assert isinstance(step, int) and isinstance(samples, int)
        self._step, self._samples = step, samples
        if self._first is None:
            self._first = now_s, samples
        if isinstance(loss, float):
            expert = str(figures["expert"])
            if expert not in self._losses:
                self._losses[expert] = Smoothed()
            self._losses[expert].add(loss)
        if isinstance(pace, float):
            self._pace.add(pace)

    def end(self, now_s: float) -> None:
        self._ended_s = now_s

    def share(self) -> float:
        """How much of the run is done, 0 to 1."""
        if self._samples_total:
            return min(1.0, self._samples / self._samples_total)
        return min(1.0, self._step / self._steps) if self._steps else 0.0

    def text(self, now_s: float) -> str:
        """`step 40 of 200, loss 0.1234 (last 0.1301), high_noise, rate 1e-04, window 8, 12.3 samples/s, 9 s left`."""
        parts = [f"step {self._step:,}" + (f" of {self._steps:,}" if self._steps else "")]
        if self._last:
            parts += self._figures()
        if self._ended_s is not None:
            parts.append(f"in {duration_text(self._ended_s - self._begun_s)}")
        elif (left := self.seconds_left(now_s)) is not None:
            parts.append(f"{duration_text(left)} left")
        return ", ".join(parts)

    def seconds_left(self, now_s: float) -> float | None:
        """None until a second step shows how long one takes."""
        if self._first is None or not self._samples_total or self._samples <= self._first[1]:
            return None
        begun_s, begun = self._first
        return (now_s - begun_s) * (self._samples_total - self._samples) / (self._samples - begun)

    def _figures(self) -> list[str]:
        last, expert = self._last, str(self._last["expert"])
        loss = last["loss"]
        smooth = f"{self._losses[expert].value:.4f}" if expert in self._losses else "unknown"
        shown = f"last {loss:.4f}" if isinstance(loss, float) else "the last is not finite"
        rate = last["rate"]
        parts = [f"loss {smooth} ({shown})", expert]
        if isinstance(rate, float):
            parts.append(f"rate {rate:.3g}")
        parts.append(f"window {last['samples_in_window']}")
        if self._pace.weight:
            pace = self._pace.value
            parts.append(f"{pace:,.0f} samples/s" if pace >= 100 else f"{pace:.3g} samples/s")
        return parts


class Smoothed:
    """An exponential mean that is the plain mean while there are few values."""

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


def _whole(value: JSON) -> int:
    """A count; 0 where it was not said."""
    return value if isinstance(value, int) else 0
