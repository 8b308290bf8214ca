"""What a person sees while work goes on: warnings at once, decisions as a table, progress with rate and time left.

On a terminal progress is a bar; elsewhere (a log file, a pipe) it is a plain line every few seconds at most. Everything
goes to standard error, so that a command's result on standard output stays clean.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, cast

from rich.console import Console as RichConsole
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from supertuner.core.events import DecisionEvent, Event, MeasurementEvent, NoteEvent, SetAsideEvent, WarningEvent
from supertuner.core.types import JSON, escape_for_terminal
from supertuner.sinks.phase_counters import PhaseCounters
from supertuner.sinks.stderr_stream import StderrStream
from supertuner.sinks.training_display import DisplayCounters, DisplayRow, TrainingDisplay

MAX_SET_ASIDE_SHOWN = 5
PLAIN_LINE_SECONDS = 5.0
BAR_SECONDS = 0.1
REFRESHES_PER_SECOND = 4
"""How often a live display is drawn by itself; each time takes milliseconds from the work it shows."""


class ConsoleSink:
    """Sink and progress for a person. Close it (or leave its `with`) to see what was still held back.

    Decisions are collected and shown together, before the next phase begins and at the end; of the files set aside
    the first few are named; `rest` says where the others are. Of figures (`Measured`) those of training are a line that
    changes; all others are a command's result, which the command itself prints.
    """

    def __init__(
        self,
        console: RichConsole | None = None,
        clock: Callable[[], float] = time.monotonic,
        set_aside_hint: str = "the run's set_aside.jsonl has them all",
    ) -> None:
        self._console = console or RichConsole(file=cast("IO[str]", StderrStream()), highlight=False)
        self._clock = clock
        self._set_aside_hint = set_aside_hint
        self._decisions: list[DecisionEvent] = []
        self._set_aside: list[SetAsideEvent] = []
        self._bars: RichProgress | None = None
        self._row_count = 0
        self._lock = threading.Lock()
        self._training = TrainingDisplay(self, self._clock)

    def emit(self, event: Event, /) -> None:
        if isinstance(event, MeasurementEvent):
            self._training.show(event)
            return
        with self._lock:
            if isinstance(event, WarningEvent):
                self.print_above(Text.assemble(("warning ", "bold yellow"), (event.what, "bold"), f": {event.message}"))
            elif isinstance(event, NoteEvent):
                self.print_above(Text(event.message))
            elif isinstance(event, DecisionEvent):
                self._decisions.append(event)
            elif isinstance(event, SetAsideEvent):
                self._set_aside.append(event)

    def phase(self, title: str, *, items: int = 0, nbytes: int = 0, noun: str = "files") -> ConsolePhase:
        self.show_decisions()
        return ConsolePhase(self, PhaseCounters(title, items, nbytes, self._clock(), noun), self._clock)

    def show_decisions(self) -> None:
        """Print the decisions that were made since the last time."""
        with self._lock:
            decisions, self._decisions = self._decisions, []
        if decisions and self._console.is_terminal:
            self.print_above(decisions_table([(d.what, d.value, d.reason) for d in decisions]))
        else:
            for d in decisions:
                self.print_above(Text(f"decided {d.what} = {value_text(d.value)}: {d.reason}"))

    def close(self) -> None:
        self._training.stop()
        self.show_decisions()
        for event in self._set_aside[:MAX_SET_ASIDE_SHOWN]:
            self.print_above(
                Text.assemble(("set aside ", "yellow"), (escape_for_terminal(event.file), "bold"), f": {event.reason}")
            )
        hidden_count = len(self._set_aside) - MAX_SET_ASIDE_SHOWN
        if hidden_count > 0:
            self.print_above(Text(f"and {hidden_count} more files set aside; {self._set_aside_hint}"))
        self._set_aside = []

    def __enter__(self) -> ConsoleSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def print_above(self, content: Text | Table) -> None:
        """Print above whatever is live."""
        self._console.print(content, soft_wrap=isinstance(content, Text))

    def open_row(self, title: str, counters: DisplayCounters) -> ProgressBarRow | None:
        """A new row of the live display, which all that is open shares; None where this is not a terminal."""
        if not self._console.is_terminal:
            return None
        with self._lock:
            self._row_count += 1
            if self._bars is None:
                columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), FiguresColumn())
                self._bars = RichProgress(*columns, console=self._console, refresh_per_second=REFRESHES_PER_SECOND)
                self._bars.start()
            return ProgressBarRow(self._bars, title, counters, self._clock)

    def close_row(self, row: DisplayRow, line: str) -> None:
        """The last row stays as it is, and the display ends; of another one `line` stays, above what is still live."""
        row.draw()
        with self._lock:
            self._row_count -= 1
            if self._row_count == 0 and self._bars is not None:
                self._bars.stop()
                self._bars = None
                return
        row.remove()
        self.print_above(Text(line))


class ConsolePhase:
    """One bar, or one series of lines. `advance` may be called from any thread, and often: drawing is rationed."""

    def __init__(self, console: ConsoleSink, counters: PhaseCounters, clock: Callable[[], float]) -> None:
        self._console = console
        self._counters = counters
        self._clock = clock
        self._lock = threading.Lock()
        self._drawn_at = clock()
        self._row: ProgressBarRow | None = None

    def advance(self, items: int = 0, nbytes: int = 0) -> None:
        now = self._clock()
        with self._lock:
            self._counters.add(items, nbytes)
            if now - self._drawn_at < (BAR_SECONDS if self._row else PLAIN_LINE_SECONDS):
                return
            self._drawn_at = now
            line = f"{self._counters.title}: {self._counters.status_text(now)}"
        self._draw(line)

    def __enter__(self) -> ConsolePhase:
        self._row = self._console.open_row(self._counters.title, self._counters)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        verb = "" if kind is None else "stopped after "
        self._counters.end(self._clock())
        line = f"{self._counters.title}: {verb}{self._counters.status_text(self._clock())}"
        if self._row is not None:
            self._console.close_row(self._row, line)
        else:
            self._draw(line)

    def _draw(self, line: str) -> None:
        if self._row is not None:
            self._row.draw()
        else:
            self._console.print_above(Text(line))


class ProgressBarRow:
    """One row of the live display: a title, a bar, and what its counters say."""

    def __init__(self, bars: RichProgress, title: str, counters: DisplayCounters, clock: Callable[[], float]) -> None:
        self._bars = bars
        self._counters = counters
        self._task = bars.add_task(title, total=1.0, counters=counters, clock=clock)

    def draw(self) -> None:
        self._bars.update(self._task, completed=self._counters.fraction_done())

    def remove(self) -> None:
        self._bars.remove_task(self._task)


class FiguresColumn(ProgressColumn):
    """The figures right of a bar, as of now: they go on when nothing advances, so that a stall can be seen."""

    def render(self, task: Task) -> Text:
        counters: DisplayCounters = task.fields["counters"]
        return Text(counters.status_text(task.fields["clock"]()), style="cyan")


def decisions_table(decisions: list[tuple[str, JSON, str]]) -> Table:
    """What was decided, and why: one row each."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("decided", overflow="fold")
    table.add_column("value", style="bold", overflow="fold")
    table.add_column("why", overflow="fold", ratio=1)
    for what, value, reason in decisions:
        table.add_row(Text(what), Text(value_text(value)), Text(reason))
    return table


def value_text(value: JSON) -> str:
    """A setting's value for people: text as it is, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
