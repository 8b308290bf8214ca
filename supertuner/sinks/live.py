"""Training on the screen: a live row on a terminal, a plain line every few seconds elsewhere, results as they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from rich.text import Text

from supertuner.core.events import Measured
from supertuner.core.types import JSON
from supertuner.sinks.training import BEGIN, END, HELD_OUT, SAMPLES, STEP, rows_of
from supertuner.sinks.training_line import TrainingLine

TITLE = "training"
LINE_SECONDS = 5.0
ROW_SECONDS = 0.25


class Counters(Protocol):
    """What a row of the display shows."""

    def share(self) -> float:
        """How much is done, 0 to 1."""

    def text(self, now_s: float, /) -> str: ...


class Row(Protocol):
    def draw(self) -> None: ...

    def remove(self) -> None: ...


class Screen(Protocol):
    def say(self, what: Text, /) -> None: ...

    def show_decisions(self) -> None: ...

    def open_row(self, title: str, counters: Counters, /) -> Row | None: ...

    def close_row(self, row: Row, line: str, /) -> None: ...


class LiveTraining:
    """Shows a training run from `train/begin`, or its first step, to `train/end`, or until it is stopped."""

    def __init__(self, screen: Screen, clock: Callable[[], float]) -> None:
        self._screen = screen
        self._clock = clock
        self._line: TrainingLine | None = None
        self._row: Row | None = None
        self._due_s = 0.0
        """When the next drawing may be."""

    def show(self, event: Measured) -> None:
        if event.what == STEP:
            self._step(event)
        elif event.what == BEGIN:
            self._begin(event)
        elif event.what == END:
            self._close("")
        elif event.what in (HELD_OUT, SAMPLES):
            text = held_out_text(event.figures) if event.what == HELD_OUT else samples_text(event.figures)
            self._screen.say(Text(text))

    def stop(self) -> None:
        """End the display of a run that did not say that it ended."""
        self._close("stopped at ")

    def _begin(self, event: Measured) -> None:
        self._close("")
        self._screen.show_decisions()
        self._line = TrainingLine(event.figures, self._clock())
        self._row = self._screen.open_row(TITLE, self._line)

    def _step(self, event: Measured) -> None:
        if self._line is None:
            self._begin(Measured(BEGIN))
            assert self._line is not None
        now = self._clock()
        self._line.add(event.figures, now)
        if now >= self._due_s:
            self._draw(now)

    def _draw(self, now_s: float) -> None:
        if self._line is None:
            return
        if self._row is not None:
            self._row.draw()
            self._due_s = now_s + ROW_SECONDS
        else:
            self._screen.say(Text(f"{TITLE}: {self._line.text(now_s)}"))
            self._due_s = now_s + LINE_SECONDS

    def _close(self, verb: str) -> None:
        line, self._line = self._line, None
        if line is None:
            return
        now = self._clock()
        line.end(now)
        last = f"{TITLE}: {verb}{line.text(now)}"
        if self._row is not None:
            self._screen.close_row(self._row, last)
            self._row = None
        else:
            self._screen.say(Text(last))


def held_out_text(figures: Mapping[str, JSON]) -> str:
    """`held-out loss at step 40: 0.1234 (high_noise 0.1300, low_noise 0.1168)`."""
    means = [row for row in rows_of(figures) if row.level is None]
    whole = [f"{row.loss:.4f}" for row in means if row.expert is None]
    parts = ", ".join(f"{row.expert} {row.loss:.4f}" for row in means if row.expert is not None)
    shown = f"{whole[0]} ({parts})" if whole and parts else (whole[0] if whole else parts or "not finite")
    return f"held-out loss at step {figures['step']}: {shown}"


def samples_text(figures: Mapping[str, JSON]) -> str:
    return f"samples of step {figures['step']}: {figures['grid']}"
