"""The display of training: one live row on a terminal, plain lines elsewhere, at little cost."""

from __future__ import annotations

import io
import time

from rich.console import Console as RichConsole

from supertuner.core.events import DecisionEvent, Event, MeasurementEvent, WarningEvent
from supertuner.sinks.console import ConsoleSink
from supertuner.sinks.training_events import (
    EveryNStepsSink,
    HeldOutLoss,
    StepRecord,
    WithoutStepsSink,
    held_out_losses,
    train_begin_event,
    train_end_event,
    train_held_out_event,
    train_step_event,
)
from supertuner.sinks.training_line import TrainingStatusLine
from tests.sinks.test_console import Clock, plain


def step_event(step: int, *, loss: float = 0.5, expert: str = "high_noise", window: int = 4) -> MeasurementEvent:
    record = StepRecord(step, step * window, window, expert, loss, 1.5, 1e-4)
    return train_step_event(record, seconds=0.5, waited_s=0.0)


class RecordedSink:
    """A sink that records its events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event, /) -> None:
        self.events.append(event)


def test_a_log_has_the_first_step_a_line_every_few_seconds_and_the_end() -> None:
    clock = Clock()
    console, out = plain(clock)
    console.emit(DecisionEvent("validation.prompts", "a cat", "given"))
    console.emit(train_begin_event(step=0, steps=20, samples=0, samples_total=80))
    for step in range(1, 21):
        clock.now += 0.5
        console.emit(step_event(step))
    console.emit(train_end_event(step=20, samples=80, seconds=10.0))
    lines = out.getvalue().splitlines()
    assert lines[0] == "decided validation.prompts = a cat: given"
    assert lines[1] == (
        "training: step 1 of 20, loss 0.5000 (last 0.5000), high_noise, rate 0.0001, window 4, 8 samples/s"
    )
    assert lines[2].endswith("step 11 of 20, loss 0.5000 (last 0.5000), high_noise, rate 0.0001, window 4, "
                             "8 samples/s, 4.5 s left")  # fmt: skip
    assert len(lines) == 4 and lines[3].startswith("training: step 20 of 20") and lines[3].endswith("in 10 s")


def test_time_left_is_computed_from_samples_because_windows_grow() -> None:
    line = TrainingStatusLine(train_begin_event(step=0, steps=3, samples=0, samples_total=70).figures, 0.0)
    for step, samples, now in ((1, 10, 5.0), (2, 30, 7.0)):
        figures = {**step_event(step).figures, "samples": samples}
        line.add(figures, now)
    assert line.seconds_left(7.0) == 4.0  # 20 samples took 2 s, 40 are left
    assert line.fraction_done() == 30 / 70


def test_the_pace_of_a_resumed_run_is_that_of_this_session() -> None:
    line = TrainingStatusLine(train_begin_event(step=100, steps=200, samples=400, samples_total=800).figures, 0.0)
    line.add(step_event(101).figures, 1.0)
    assert line.seconds_left(1.0) is None
    line.add(step_event(102).figures, 2.0)
    assert line.seconds_left(2.0) == 98.0


def test_the_loss_is_smoothed_per_expert() -> None:
    line = TrainingStatusLine({}, 0.0)
    for step in range(1, 9):
        line.add(step_event(step, loss=1.0, expert="high_noise").figures, float(step))
        line.add(step_event(step, loss=0.25, expert="low_noise").figures, float(step))
    assert "loss 0.2500 (last 0.2500), low_noise" in line.status_text(9.0)


def test_a_loss_that_is_not_finite_is_shown_and_not_added_to_the_mean() -> None:
    line = TrainingStatusLine({}, 0.0)
    line.add(step_event(1, loss=0.5).figures, 1.0)
    line.add(step_event(2, loss=float("nan")).figures, 2.0)
    assert "loss 0.5000 (last not finite)" in line.status_text(2.0)


def test_a_terminal_shows_one_live_display_with_other_messages_above_it() -> None:
    clock, out = Clock(), io.StringIO()
    rich = RichConsole(file=out, force_terminal=True, width=200, color_system=None)
    with ConsoleSink(rich, clock) as console:
        console.emit(train_begin_event(step=0, steps=2, samples=0, samples_total=8))
        clock.now += 1
        console.emit(step_event(1))
        with console.phase("samples of step 1", items=2, noun="samples") as phase:
            clock.now += 1
            phase.advance(2)
            console.emit(WarningEvent("x", "while both are shown"))
        console.emit(train_held_out_event(1, [HeldOutLoss(None, None, 0.25), HeldOutLoss("high_noise", None, 0.25)]))
        clock.now += 1
        console.emit(step_event(2, loss=0.125))
        console.emit(train_end_event(step=2, samples=8, seconds=3.0))
    shown = out.getvalue()
    assert "warning x: while both are shown" in shown
    assert "held-out loss at step 1: 0.2500 (high_noise 0.2500)\n" in shown
    assert "samples of step 1: 2 samples, 2 samples/s, in 1.0 s" in shown
    last = shown.rstrip("\n").splitlines()[-2]  # the last line shows the cursor again
    assert "step 2 of 2" in last and "in 3.0 s" in last and "samples of step 1" not in last


def test_after_an_interrupted_run_the_cursor_is_visible() -> None:
    out = io.StringIO()
    with ConsoleSink(RichConsole(file=out, force_terminal=True, width=200, color_system=None), Clock()) as console:
        console.emit(step_event(7))
    assert out.getvalue().rstrip("\n").endswith("\x1b[?25h")  # shows the cursor


def test_a_log_shows_where_a_run_was_interrupted() -> None:
    console, out = plain()
    with console:
        console.emit(train_begin_event(step=0, steps=9, samples=0, samples_total=36))
        console.emit(step_event(7))
    assert out.getvalue().splitlines()[-1].startswith("training: stopped at step 7 of 9")


def test_a_step_costs_the_display_less_than_a_tenth_of_a_millisecond() -> None:
    steps = 20_000
    for terminal in (False, True):
        rich = RichConsole(file=io.StringIO(), force_terminal=terminal, width=120)
        with ConsoleSink(rich) as console:
            console.emit(train_begin_event(step=0, steps=steps, samples=0, samples_total=4 * steps))
            events = [step_event(step) for step in range(1, steps + 1)]
            begin = time.process_time()  # of all threads, including the one that draws
            for event in events:
                console.emit(event)
            cost_s = (time.process_time() - begin) / steps
        assert cost_s < 1e-4


def test_every_nth_step_and_all_other_events_are_passed_on() -> None:
    recorded = RecordedSink()
    thin = EveryNStepsSink(recorded, 3)
    for step in range(1, 8):
        thin.emit(step_event(step))
    thin.emit(train_held_out_event(7, []))
    thin.emit(WarningEvent("x", "y"))
    assert [e.figures["step"] for e in recorded.events if isinstance(e, MeasurementEvent)] == [3, 6, 7]
    assert isinstance(recorded.events[-1], WarningEvent)


def test_a_sink_without_steps_receives_all_other_events() -> None:
    recorded = RecordedSink()
    sink = WithoutStepsSink(recorded)
    for event in (step_event(1), train_held_out_event(1, []), WarningEvent("x", "y")):
        sink.emit(event)
    assert len(recorded.events) == 2


def test_figures_that_are_not_finite_are_none() -> None:
    figures = step_event(1, loss=float("inf")).figures
    assert figures["loss"] is None and figures["grad_norm"] == 1.5
    rows = train_held_out_event(1, [HeldOutLoss("model", 0.5, float("nan")), HeldOutLoss("model", 0.7, 0.25)])
    assert held_out_losses(rows.figures) == [HeldOutLoss("model", 0.7, 0.25)]
