"""Shows training: a live row on a terminal, else a plain line every few seconds; results when they are reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from rich.text import Text

from supertuner.core.events import MeasurementEvent
from supertuner.core.types import JSON
from supertuner.sinks import training_events as training
from supertuner.sinks.training_line import TrainingStatusLine

TRAINING_TITLE = "training"
LINE_SECONDS = 5.0
ROW_SECONDS = 0.25


class DisplayCounters(Protocol):
    """The content of a row of the display."""

    def fraction_done(self) -> float:
        """How much is done, 0 to 1."""

    def status_text(self, now_s: float, /) -> str: ...


class DisplayRow(Protocol):
    def draw(self) -> None: ...

    def remove(self) -> None: ...


class DisplayScreen(Protocol):
    def print_above(self, content: Text, /) -> None: ...

    def show_decisions(self) -> None: ...

    def open_row(self, title: str, counters: DisplayCounters, /) -> DisplayRow | None: ...

    def close_row(self, row: DisplayRow, line: str, /) -> None: ...


class TrainingDisplay:
    """Shows a training run, from `train/begin` or its first step to `train/end` or `stop`."""

    def __init__(self, screen: DisplayScreen, clock: Callable[[], float]) -> None:
        self._screen = screen
        self._clock = clock
        self._status_line: TrainingStatusLine | None = None
        self._row: DisplayRow | None = None
        self._next_draw_s = 0.0
        """When the display may be redrawn."""

    def show(self, event: MeasurementEvent) -> None:
        if event.what == training.TRAIN_STEP:
            self._show_step(event)
        elif event.what == training.TRAIN_BEGIN:
            self._show_begin(event.figures)
        elif event.what == training.TRAIN_END:
            self._close("")
        elif event.what == training.TRAIN_HELD_OUT:
            self._screen.print_above(Text(held_out_text(event.figures)))
        elif event.what == training.TRAIN_SAMPLES:
            self._screen.print_above(Text(samples_text(event.figures)))

    def stop(self) -> None:
        """End the display of a run that sent no `train/end`."""
        self._close("stopped at ")

    def _show_begin(self, figures: Mapping[str, JSON]) -> None:
        self._close("")
        self._screen.show_decisions()
        self._status_line = TrainingStatusLine(figures, self._clock())
        self._row = self._screen.open_row(TRAINING_TITLE, self._status_line)

    def _show_step(self, event: MeasurementEvent) -> None:
        if self._status_line is None:
            self._show_begin({})
            assert self._status_line is not None
        now = self._clock()
        self._status_line.add(event.figures, now)
        if now < self._next_draw_s:
            return
        if self._row is not None:
            self._row.draw()
        else:
            self._screen.print_above(Text(f"{TRAINING_TITLE}: {self._status_line.status_text(now)}"))
        self._next_draw_s = now + (ROW_SECONDS if self._row is not None else LINE_SECONDS)

    def _close(self, verb: str) -> None:
        line, self._status_line = self._status_line, None
        if line is None:
            return
        now = self._clock()
        line.end(now)
        last = f"{TRAINING_TITLE}: {verb}{line.status_text(now)}"
        if self._row is not None:
            self._screen.close_row(self._row, last)
            self._row = None
        else:
            self._screen.print_above(Text(last))


def held_out_text(figures: Mapping[str, JSON]) -> str:
    """`held-out loss at step 40: 0.1234 (high_noise 0.1300, low_noise 0.1168)`."""
    means = [row for row in training.held_out_losses(figures) if row.sigma is None]
    overall = [f"{row.loss:.4f}" for row in means if row.expert is None]
    parts = ", ".join(f"{row.expert} {row.loss:.4f}" for row in means if row.expert is not None)
    shown = f"{overall[0]} ({parts})" if overall and parts else (overall[0] if overall else parts or "not finite")
    return f"held-out loss at step {figures['step']}: {shown}"


def samples_text(figures: Mapping[str, JSON]) -> str:
    return f"samples of step {figures['step']}: {figures['grid']}"
