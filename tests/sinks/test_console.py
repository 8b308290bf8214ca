"""The console shows every event; progress is a bar on a terminal and a few plain lines elsewhere."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console as RichConsole

from supertuner.core.events import DecisionEvent, NoteEvent, SetAsideEvent, WarningEvent
from supertuner.sinks.console import ConsoleSink
from supertuner.sinks.phase_counters import PhaseCounters, duration_text


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain(clock: Clock | None = None) -> tuple[ConsoleSink, io.StringIO]:
    out = io.StringIO()
    return ConsoleSink(RichConsole(file=out, width=200), clock or Clock()), out


def test_a_warning_is_shown_at_once() -> None:
    console, out = plain()
    console.emit(WarningEvent("datasets[0].in_memory.memory_limit_gb", "360 is more than there is; lowered to 21.5"))
    assert out.getvalue() == (
        "warning datasets[0].in_memory.memory_limit_gb: 360 is more than there is; lowered to 21.5\n"
    )


def test_square_brackets_in_a_message_are_text_not_markup() -> None:
    console, out = plain()
    console.emit(WarningEvent("datasets[red]", "[bold]x[/bold] [/]"))
    assert out.getvalue() == "warning datasets[red]: [bold]x[/bold] [/]\n"


def test_decisions_are_shown_with_their_reasons_before_the_next_phase() -> None:
    console, out = plain()
    console.emit(DecisionEvent("compression", "none", "saves nothing"))
    console.emit(DecisionEvent("workers", 2, "CPUs"))
    with console.phase("staging", items=1):
        shown = out.getvalue()
    assert shown == "decided compression = none: saves nothing\ndecided workers = 2: CPUs\n"


def test_on_a_terminal_decisions_are_a_table() -> None:
    out = io.StringIO()
    with ConsoleSink(RichConsole(file=out, force_terminal=True, width=100, color_system=None)) as console:
        console.emit(DecisionEvent("compression", "none", "saves nothing"))
    header, row = out.getvalue().splitlines()
    assert header.split() == ["decided", "value", "why"]
    assert row.index("none") == header.index("value")
    assert row.index("saves nothing") == header.index("why")


def test_the_first_set_aside_files_are_listed_and_the_rest_counted() -> None:
    console, out = plain()
    with console:
        for number in range(8):
            console.emit(SetAsideEvent("cats", f"{number}.jpg", "truncated"))
    lines = out.getvalue().splitlines()
    assert lines[0] == "set aside 0.jpg: truncated"
    assert len(lines) == 6
    assert lines[-1].startswith("and 3 more files")


def test_a_log_file_gets_a_line_every_few_seconds_and_one_at_the_end() -> None:
    clock = Clock()
    console, out = plain(clock)
    with console.phase("staging cats", items=1000, nbytes=1000 << 20) as phase:
        for _ in range(1000):
            clock.now += 1 / 32  # exact in binary
            phase.advance(1, 1 << 20)
    lines = out.getvalue().splitlines()
    assert len(lines) == 7
    assert lines[0] == "staging cats: 160 of 1,000 files, 160 MiB of 1000 MiB, 32.0 MiB/s, 26 s left"
    assert lines[-1] == "staging cats: 1,000 files, 1000 MiB, 32.0 MiB/s, in 31 s"


def test_a_finished_phase_is_shown_once_and_without_time_left() -> None:
    clock = Clock()
    console, out = plain(clock)
    with console.phase("held-out loss", items=2, noun="experts") as phase:
        clock.now += 8
        phase.advance(2)
    assert out.getvalue().splitlines() == ["held-out loss: 2 experts, 0.25 experts/s, in 8.0 s"]


def test_a_failed_phase_shows_how_far_it_got() -> None:
    clock = Clock()
    console, out = plain(clock)
    with pytest.raises(ValueError), console.phase("staging", items=10) as phase:
        clock.now += 2
        phase.advance(4)
        raise ValueError
    assert out.getvalue() == "staging: stopped after 4 of 10 files, 2 files/s, in 2.0 s\n"


def test_a_terminal_shows_a_bar_with_rate_and_time_left() -> None:
    clock, out = Clock(), io.StringIO()
    console = ConsoleSink(RichConsole(file=out, force_terminal=True, width=140, color_system=None), clock)
    with console.phase("staging cats", items=10, nbytes=100 << 20) as phase:
        clock.now += 5
        phase.advance(5, 50 << 20)
        console.emit(WarningEvent("x", "while a bar is shown"))
    assert "5 of 10 files, 50.0 MiB of 100 MiB, 10.0 MiB/s" in out.getvalue()
    assert "warning x: while a bar is shown" in out.getvalue()
    assert "━" in out.getvalue()


def test_concurrent_advances_are_all_counted() -> None:
    console, out = plain()
    with console.phase("staging", items=4000) as phase:

        def work() -> None:
            for _ in range(1000):
                phase.advance(1)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert "4,000 files" in out.getvalue()


def test_time_left_is_unknown_until_something_is_done() -> None:
    assert "left" not in PhaseCounters("t", 8, 0, 0.0).status_text(5.0)
    assert PhaseCounters("t", 8, 0, 0.0, items=2).status_text(5.0).endswith(", 15 s left")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0.4 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_control_characters_in_names_are_escaped_and_the_hint_is_shown() -> None:
    out = io.StringIO()
    with ConsoleSink(RichConsole(file=out, width=200), Clock(), set_aside_hint="ask elsewhere") as console:
        for number in range(6):
            console.emit(SetAsideEvent("cats", f"{number}\x1b[31m\n.jpg", "broken"))
    assert "\x1b" not in out.getvalue() and "0\\x1b[31m\\n.jpg: broken\n" in out.getvalue()
    assert out.getvalue().endswith("and 1 more files set aside; ask elsewhere\n")


def test_a_phase_without_figures_shows_only_its_duration() -> None:
    console, out = plain()
    with console.phase("listing cats"):
        pass
    assert out.getvalue() == "listing cats: 0.0 s\n"


def test_events_cannot_control_the_terminal() -> None:
    stream = io.StringIO()
    with ConsoleSink(RichConsole(file=stream, width=200)) as console:
        console.emit(WarningEvent("key\x1b[2J", "text\x1b]0;title\x07"))
        console.emit(NoteEvent("run", "one\ntwo\x1b[31m"))
        console.emit(DecisionEvent("datasets[\x1b[5m]", "\x1b[7m", "because\x07"))
    assert "\x1b" not in stream.getvalue() and "\x07" not in stream.getvalue()
    assert "key\\x1b[2J: text\\x1b]0;title\\x07" in stream.getvalue() and "one\ntwo\\x1b[31m" in stream.getvalue()


@pytest.mark.parametrize(("items", "rate"), [(1, "0.0167"), (90, "1.5"), (60_000, "1,000")])
def test_a_slow_rate_is_not_shown_as_zero(items: int, rate: str) -> None:
    counters = PhaseCounters("encoding", 0, 0, started_s=0.0, noun="entries", items=items)
    assert f"{rate} entries/s" in counters.status_text(60.0)
