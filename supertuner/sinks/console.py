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

from supertuner.core.events import Decided, Event, Measured, Noted, SetAside, Warned
from supertuner.core.types import JSON, on_screen
from supertuner.sinks.figures import Tally
from supertuner.sinks.live import Counters, LiveTraining, Row
from supertuner.sinks.screen import Screen

SET_ASIDE_SHOWN = 5
PLAIN_SECONDS = 5.0
BAR_SECONDS = 0.1
DRAWN_PER_SECOND = 4
"""How often a live display is drawn by itself; each time takes milliseconds from the work it shows."""


class Console:
    """Sink and progress for a person. Close it (or leave its `with`) to see what was still held back.

    Decisions are collected and shown together, before the next phase begins and at the end; of the files set aside
    the first few are named; `rest` says where the others are. Of figures (`Measured`) those of training are a line that
    changes; all others are a command's result, which the command itself prints.
    """

    def __init__(
        self,
        console: RichConsole | None = None,
        clock: Callable[[], float] = time.monotonic,
        rest: str = "the run's set_aside.jsonl has them all",
    ) -> None:
        self._console = console or RichConsole(file=cast("IO[str]", Screen()), highlight=False)
        self._clock = clock
        self._rest = rest
        self._decisions: list[Decided] = []
        self._set_aside: list[SetAside] = []
        self._bars: RichProgress | None = None
        self._rows = 0
        self._guard = threading.Lock()
        self._training = LiveTraining(self, self._clock)

    def emit(self, event: Event, /) -> None:
        if isinstance(event, Measured):
            self._training.show(event)
            return
        with self._guard:
            if isinstance(event, Warned):
                self.say(Text.assemble(("warning ", "bold yellow"), (event.what, "bold"), f": {event.message}"))
            elif isinstance(event, Noted):
                self.say(Text(event.message))
            elif isinstance(event, Decided):
                self._decisions.append(event)
            elif isinstance(event, SetAside):
                self._set_aside.append(event)

    def phase(self, title: str, *, items: int = 0, nbytes: int = 0, noun: str = "files") -> Phase:
        self.show_decisions()
        return Phase(self, Tally(title, items, nbytes, self._clock(), noun), self._clock)

    def show_decisions(self) -> None:
        """Print the decisions that were made since the last time."""
        with self._guard:
            decisions, self._decisions = self._decisions, []
        if decisions and self._console.is_terminal:
            self.say(decisions_table([(d.what, d.value, d.reason) for d in decisions]))
        else:
            for d in decisions:
                self.say(Text(f"decided {d.what} = {value_text(d.value)}: {d.reason}"))

    def close(self) -> None:
        self._training.stop()
        self.show_decisions()
        for event in self._set_aside[:SET_ASIDE_SHOWN]:
            self.say(Text.assemble(("set aside ", "yellow"), (on_screen(event.file), "bold"), f": {event.reason}"))
        more = len(self._set_aside) - SET_ASIDE_SHOWN
        if more > 0:
            self.say(Text(f"and {more} more files set aside; {self._rest}"))
        self._set_aside = []

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def say(self, what: Text | Table) -> None:
        """Print above whatever is live."""
        self._console.print(what, soft_wrap=isinstance(what, Text))

    def open_row(self, title: str, counters: Counters) -> BarRow | None:
        """A new row of the live display, which all that is open shares; None where this is not a terminal."""
        if not self._console.is_terminal:
            return None
        with self._guard:
            self._rows += 1
            if self._bars is None:
                columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), FiguresColumn())
                self._bars = RichProgress(*columns, console=self._console, refresh_per_second=DRAWN_PER_SECOND)
                self._bars.start()
            return BarRow(self._bars, title, counters, self._clock)

    def close_row(self, row: Row, line: str) -> None:
        """The last row stays as it is, and the display ends; of another one `line` stays, above what is still live."""
        row.draw()
        with self._guard:
            self._rows -= 1
            if self._rows == 0 and self._bars is not None:
                self._bars.stop()
                self._bars = None
                return
        row.remove()
        self.say(Text(line))


class Phase:
    """One bar, or one series of lines. `advance` may be called from any thread, and often: drawing is rationed."""

    def __init__(self, console: Console, tally: Tally, clock: Callable[[], float]) -> None:
        self._console = console
        self._tally = tally
        self._clock = clock
        self._guard = threading.Lock()
        self._drawn_at = clock()
        self._row: BarRow | None = None

    def advance(self, items: int = 0, nbytes: int = 0) -> None:
        now = self._clock()
        with self._guard:
            self._tally.add(items, nbytes)
            if now - self._drawn_at < (BAR_SECONDS if self._row else PLAIN_SECONDS):
                return
            self._drawn_at = now
            line = f"{self._tally.title}: {self._tally.text(now)}"
        self._draw(line)

    def __enter__(self) -> Phase:
        self._row = self._console.open_row(self._tally.title, self._tally)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        verb = "" if kind is None else "stopped after "
        self._tally.end(self._clock())
        line = f"{self._tally.title}: {verb}{self._tally.text(self._clock())}"
        if self._row is not None:
            self._console.close_row(self._row, line)
        else:
            self._draw(line)

    def _draw(self, line: str) -> None:
        if self._row is not None:
            self._row.draw()
        else:
            self._console.say(Text(line))


class BarRow:
    """One row of the live display: a title, a bar, and what its counters say."""

    def __init__(self, bars: RichProgress, title: str, counters: Counters, clock: Callable[[], float]) -> None:
        self._bars = bars
        self._counters = counters
        self._task = bars.add_task(title, total=1.0, counters=counters, clock=clock)

    def draw(self) -> None:
        self._bars.update(self._task, completed=self._counters.share())

    def remove(self) -> None:
        self._bars.remove_task(self._task)


class FiguresColumn(ProgressColumn):
    """The figures right of a bar, as of now: they go on when nothing advances, so that a stall can be seen."""

    def render(self, task: Task) -> Text:
        counters: Counters = task.fields["counters"]
        return Text(counters.text(task.fields["clock"]()), style="cyan")


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
