"""Records, inside a measured process, the time of each step and of the start, and takes turns with another process.

It is a sink of the run, so the training code does not know that it is measured. Its own time is not counted: time in
`emit` is excluded, and a process that waits for its turn is stopped as a whole (SIGTSTP), with all its threads.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Final

from supertuner.core.events import MEMORY_MEASUREMENT, Event, MeasurementEvent
from supertuner.core.types import JSON
from supertuner.sinks import training_events as training
from supertuner.tools.baseline.record import MeasuredStep, PeakMemory, StartupTimes, finite_or_none

MEMORY_KIND_BY_METRIC: Final[Mapping[str, str]] = {
    "torch.allocated_peak_bytes": "gpu.allocated",
    "torch.reserved_peak_bytes": "gpu.reserved",
    "nvml.used_bytes": "gpu.used",
    "uvm.device_bytes.peak": "uvm.device",
    "uvm.managed_bytes.peak": "uvm.managed",
}
"""Metric of the run's telemetry → kind of memory whose peak it is."""


class MeasurementRecorder:
    """A sink that records steps.

    `started` is CLOCK_MONOTONIC at the start of this process; `turn_steps` and `stop_after` are those of
    `MeasurementRequest`; `stop` ends a turn and returns when the next one begins. The attribute `after_step` is called
    after each step.
    """

    def __init__(
        self,
        started: float,
        turn_steps: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        stop: Callable[[], None] | None = None,
        stop_after: int = 0,
    ) -> None:
        self.steps: list[MeasuredStep] = []
        self.after_step: Callable[[], object] = lambda: None
        self.peaks = PeakMemory()
        self.cold = False
        self._setup_s = 0.0
        self._started = started
        self._turn_steps = turn_steps
        self._stop_after = stop_after
        self._clock = clock
        self._parent = os.getppid()
        self._stop = stop or stop_until_continued
        self._last_step_end = started

    def emit(self, event: Event, /) -> None:
        if not isinstance(event, MeasurementEvent):
            return
        if event.what == training.TRAIN_STEP:
            self._record_event(event.figures)
        elif event.what == training.TRAIN_BEGIN:
            self.begin_training(self._clock())
        elif event.what == MEMORY_MEASUREMENT:
            self.peaks.update(_memory_peaks(event.figures))
        elif event.what.endswith(".staging"):
            self.cold |= event.figures.get("reused") is False
        elif event.what.startswith("cache."):
            self.cold |= bool(event.figures.get("made"))

    def begin_training(self, now: float) -> None:
        """Record that training begins at `now`, and wait for the first turn."""
        self._setup_s = now - self._started
        self._wait_for_turn()

    def record_step(self, window: int, expert: str, loss: float | None, seconds: float, waited_s: float = 0.0) -> None:
        """Record a finished step. Peers call it, because they emit no events."""
        if os.getppid() != self._parent:
            os._exit(1)  # the measuring process was killed: it will neither read a result nor send SIGCONT
        number, wall_s = len(self.steps) + 1, self._clock() - self._last_step_end
        self.steps.append(MeasuredStep(number, window, expert, finite_or_none(loss), seconds, waited_s, wall_s))
        self.after_step()
        if number == self._stop_after:
            os.kill(os.getpid(), signal.SIGTERM)  # training handles it: it saves and stops
        if self._turn_steps and number % self._turn_steps == 0:
            self._wait_for_turn()
        else:
            self._last_step_end = self._clock()

    def startup_times(self) -> StartupTimes:
        return StartupTimes(self._setup_s, self._setup_s + self.steps[0].seconds, self.cold)

    def _record_event(self, figures: Mapping[str, JSON]) -> None:
        window, seconds, waited_s = figures["samples_in_window"], figures["seconds"], figures["waited_s"]
        loss = figures["loss"]
        assert isinstance(window, int) and isinstance(seconds, float) and isinstance(waited_s, float)
        self.record_step(window, str(figures["expert"]), loss if isinstance(loss, float) else None, seconds, waited_s)

    def _wait_for_turn(self) -> None:
        if self._turn_steps:
            self._stop()
        self._last_step_end = self._clock()


def stop_until_continued() -> None:
    """Stop this process with all its threads until SIGCONT arrives.

    It does not stay stopped if the measuring process is killed: the kernel sends SIGHUP to a stopped process group that
    becomes orphaned, and SIGTSTP does not stop an orphaned group.
    """
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)  # our parent may have started us with SIGTSTP ignored
    os.kill(os.getpid(), signal.SIGTSTP)


def _memory_peaks(figures: Mapping[str, JSON]) -> dict[str, int]:
    return {
        MEMORY_KIND_BY_METRIC[name]: int(value)
        for name, value in figures.items()
        if name in MEMORY_KIND_BY_METRIC and isinstance(value, int)
    }
