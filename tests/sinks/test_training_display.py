"""Training on the screen: one live row on a terminal, plain lines elsewhere, and hardly any time for either."""

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


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event, /) -> None:
        self.events.append(event)


def test_a_log_gets_the_first_step_a_line_every_few_seconds_and_the_end() -> None:
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


def test_time_left_counts_samples_because_windows_grow() -> None:
    line = TrainingStatusLine(train_begin_event(step=0, steps=3, samples=0, samples_total=70).figures, 0.0)
    for step, samples, now in ((1, 10, 5.0), (2, 30, 7.0)):
        figures = {**step_event(step).figures, "samples": samples}
        line.add(figures, now)
    assert line.seconds_left(7.0) == 4.0  # 20 samples took 2 s, 40 are left
    assert line.fraction_done() == 30 / 70


def test_a_resumed_run_takes_its_pace_from_this_session() -> None:
    line = TrainingStatusLine(train_begin_event(step=100, steps=200, samples=400, samples_total=800).figures, 0.0)
    line.add(step_event(101).figures, 1.0)
    assert line.seconds_left(1.0) is None
    line.add(step_event(102).figures, 2.0)
    assert line.seconds_left(2.0) == 98.0


def test_the_loss_is_smoothed_for_each_expert_by_itself() -> None:
    line = TrainingStatusLine({}, 0.0)
    for step in range(1, 9):
        line.add(step_event(step, loss=1.0, expert="high_noise").figures, float(step))
        line.add(step_event(step, loss=0.25, expert="low_noise").figures, float(step))
    assert "loss 0.2500 (last 0.2500), low_noise" in line.status_text(9.0)


def test_a_loss_that_is_not_finite_is_said_and_does_not_spoil_the_mean() -> None:
    line = TrainingStatusLine({}, 0.0)
    line.add(step_event(1, loss=0.5).figures, 1.0)
    line.add(step_event(2, loss=float("nan")).figures, 2.0)
    assert "loss 0.5000 (the last is not finite)" in line.status_text(2.0)


def test_a_terminal_shows_one_live_display_and_what_happens_during_training_above_it() -> None:
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
    last = shown.rstrip("\n").splitlines()[-2]  # the very last gives the cursor back
    assert "step 2 of 2" in last and "in 3.0 s" in last and "samples of step 1" not in last


def test_a_run_that_breaks_off_leaves_the_terminal_as_it_was() -> None:
    out = io.StringIO()
    with ConsoleSink(RichConsole(file=out, force_terminal=True, width=200, color_system=None), Clock()) as console:
        console.emit(step_event(7))
    assert out.getvalue().rstrip("\n").endswith("\x1b[?25h")  # the cursor is back


def test_a_log_says_where_a_run_broke_off() -> None:
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
            begin = time.process_time()  # of all threads: the one that draws counts too
            for event in events:
                console.emit(event)
            cost_s = (time.process_time() - begin) / steps
        assert cost_s < 1e-4


def test_thinning_passes_one_step_in_n_and_everything_else() -> None:
    kept = Kept()
    thin = EveryNStepsSink(kept, 3)
    for step in range(1, 8):
        thin.emit(step_event(step))
    thin.emit(train_held_out_event(7, []))
    thin.emit(WarningEvent("x", "y"))
    assert [e.figures["step"] for e in kept.events if isinstance(e, MeasurementEvent)] == [3, 6, 7]
    assert isinstance(kept.events[-1], WarningEvent)


def test_a_sink_without_steps_gets_everything_else() -> None:
    kept = Kept()
    sink = WithoutStepsSink(kept)
    for event in (step_event(1), train_held_out_event(1, []), WarningEvent("x", "y")):
        sink.emit(event)
    assert len(kept.events) == 2


def test_figures_that_are_not_numbers_are_none_so_that_json_can_hold_them() -> None:
    figures = step_event(1, loss=float("inf")).figures
    assert figures["loss"] is None and figures["grad_norm"] == 1.5
    rows = train_held_out_event(1, [HeldOutLoss("model", 0.5, float("nan")), HeldOutLoss("model", 0.7, 0.25)])
    assert held_out_losses(rows.figures) == [HeldOutLoss("model", 0.7, 0.25)]
