"""Shows events and progress to a person: warnings at once, decisions as a table, progress with rate and time left.

On a terminal, progress is a bar; elsewhere (a log file, a pipe) it is a plain line every few seconds. Everything goes
to standard error, so that standard output holds only the result of a command.
"""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, cast

from rich.console import Console as RichConsole
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from supertuner.core.closing import CloseOnExit
from supertuner.core.events import DecisionEvent, Event, MeasurementEvent, NoteEvent, SetAsideEvent, WarningEvent
from supertuner.core.types import JSON, escape_for_terminal, escape_lines
from supertuner.sinks.phase_counters import PhaseCounters
from supertuner.sinks.training_display import DisplayCounters, DisplayRow, TrainingDisplay

MAX_SET_ASIDE_SHOWN = 5
PLAIN_LINE_SECONDS = 5.0
BAR_SECONDS = 0.1
REFRESHES_PER_SECOND = 4
"""How often a live display is redrawn; each time costs milliseconds of the work that it shows."""


class ConsoleSink(CloseOnExit):
    """Sink and progress display for a person. `close` prints what was collected.

    Decisions are collected and shown together, before the next phase and at the end. `close` lists the first few
    set-aside files; `set_aside_hint` says where the others are. Of measurements, only those of training are shown, as a
    line that is updated; others are results of commands, which the commands print.
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
                what, message = escape_for_terminal(event.what), escape_lines(event.message)
                self.print_above(Text.assemble(("warning ", "bold yellow"), (what, "bold"), f": {message}"))
            elif isinstance(event, NoteEvent):
                self.print_above(Text(escape_lines(event.message)))
            elif isinstance(event, DecisionEvent):
                self._decisions.append(event)
            elif isinstance(event, SetAsideEvent):
                self._set_aside.append(event)

    def phase(self, title: str, *, items: int = 0, nbytes: int = 0, noun: str = "files") -> ConsolePhase:
        self.show_decisions()
        return ConsolePhase(self, PhaseCounters(title, items, nbytes, self._clock(), noun), self._clock)

    def show_decisions(self) -> None:
        """Print the decisions since the last call."""
        with self._lock:
            decisions, self._decisions = self._decisions, []
        if decisions and self._console.is_terminal:
            self.print_above(decisions_table([(d.what, d.value, d.reason) for d in decisions]))
        else:
            for d in decisions:
                self.print_above(Text(escape_lines(f"decided {d.what} = {value_text(d.value)}: {d.reason}")))

    def close(self) -> None:
        self._training.stop()
        self.show_decisions()
        for event in self._set_aside[:MAX_SET_ASIDE_SHOWN]:
            file = escape_for_terminal(event.file)
            self.print_above(Text.assemble(("set aside ", "yellow"), (file, "bold"), f": {event.reason}"))
        hidden_count = len(self._set_aside) - MAX_SET_ASIDE_SHOWN
        if hidden_count > 0:
            self.print_above(Text(f"and {hidden_count} more files set aside; {self._set_aside_hint}"))
        self._set_aside = []

    def print_above(self, content: Text | Table) -> None:
        """Print above the live display."""
        self._console.print(content, soft_wrap=isinstance(content, Text))

    def open_row(self, title: str, counters: DisplayCounters) -> ProgressBarRow | None:
        """Open a row of the live display; None if the console is not a terminal."""
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
        """Close a row. The last open row stays on the screen and the live display ends; another row is replaced by
        `line`, printed above the display."""
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
    """A bar, or a series of lines. `advance` may be called often and from any thread; drawing is rate-limited."""

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
            if self._row is None and self._counters.fraction_done() == 1.0:
                return  # the last line follows at once
            self._drawn_at = now
            line = f"{self._counters.title}: {self._counters.status_text(now)}"
        self._draw(line)

    def __enter__(self) -> ConsolePhase:
        self._row = self._console.open_row(self._counters.title, self._counters)
        return self

    def __exit__(self, kind: object, *error: object) -> None:
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
    """One row of the live display: a title, a bar and the text of its counters."""

    def __init__(self, bars: RichProgress, title: str, counters: DisplayCounters, clock: Callable[[], float]) -> None:
        self._bars = bars
        self._counters = counters
        self._task = bars.add_task(title, total=1.0, counters=counters, clock=clock)

    def draw(self) -> None:
        self._bars.update(self._task, completed=self._counters.fraction_done())

    def remove(self) -> None:
        self._bars.remove_task(self._task)


class StderrStream(io.TextIOBase):
    """The current standard error; errors when writing to it are ignored.

    A terminal may be closed, the reader of a pipe may exit, the disk of a log may be full: that must not end hours of
    training. The run folder has all events.
    """

    def write(self, text: str, /) -> int:
        with suppress(OSError):  # see the class docstring
            _real_stderr().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):  # see the class docstring
            _real_stderr().flush()

    def isatty(self) -> bool:
        return _real_stderr().isatty()

    def fileno(self) -> int:
        return _real_stderr().fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # an attribute in TextIOBase
        return sys.stderr.encoding or "utf-8"


def _real_stderr() -> IO[str]:
    """Standard error, not the proxy that rich installs during a live display: that would write to us again."""
    stream: IO[str] = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    return stream


class FiguresColumn(ProgressColumn):
    """The figures right of a bar. They are updated even if nothing advances, so that a stall is visible."""

    def render(self, task: Task) -> Text:
        counters: DisplayCounters = task.fields["counters"]
        return Text(counters.status_text(task.fields["clock"]()), style="cyan")


def decisions_table(decisions: list[tuple[str, JSON, str]]) -> Table:
    """A table with one row per decision: name, value, reason."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("decided", overflow="fold")
    table.add_column("value", style="bold", overflow="fold")
    table.add_column("why", overflow="fold", ratio=1)
    for what, value, reason in decisions:
        table.add_row(*(Text(escape_lines(text)) for text in (what, value_text(value), reason)))
    return table


def value_text(value: JSON) -> str:
    """A value for people: text unchanged, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
