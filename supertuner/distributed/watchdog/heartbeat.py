"""Signs of life of the training thread: what it is doing, and when it last made progress.

They come from what happens anyway: events, progress updates, the passes of a window. Writing one never waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from supertuner.core.events import Event, MeasurementEvent, Progress, ProgressPhase, Sink
from supertuner.core.interrupts import raise_lost_interrupt
from supertuner.sinks.training_events import TRAIN_STEP
from supertuner.step.train_step import GradientReduction


@dataclass(slots=True)
class Heartbeat:
    """Written by the training thread, read by the watchdog's thread; a read between two writes is slightly old."""

    activity: str = "starting"
    step: int = 0
    """Finished optimizer steps: the same count in all ranks."""
    marks: int = 0
    in_window: bool = False
    """Whether a window's forward and backward passes run: there each micro-batch is a sign of life, and none means a
    hang. Elsewhere work may be silent for long (a download, a compiler): CPU and I/O use tell it from a hang."""

    def mark(self, *, in_window: bool = False) -> None:
        self.in_window = in_window
        self.marks += 1


class HeartbeatSink:
    """A sink that records each event as a sign of life and passes it on."""

    def __init__(self, sink: Sink, heartbeat: Heartbeat) -> None:
        self._sink, self._heartbeat = sink, heartbeat

    def emit(self, event: Event, /) -> None:
        if isinstance(event, MeasurementEvent) and event.what == TRAIN_STEP:
            step = event.figures["step"]
            assert isinstance(step, int)
            self._heartbeat.step = step
        self._heartbeat.mark()
        self._sink.emit(event)


class HeartbeatProgress:
    """Progress that records each update as a sign of life, and phase titles as the current activity."""

    def __init__(self, progress: Progress, heartbeat: Heartbeat) -> None:
        self._progress, self._heartbeat = progress, heartbeat

    def phase(self, title: str, *, items: int = 0, nbytes: int = 0, noun: str = "files") -> ProgressPhase:
        phase = self._progress.phase(title, items=items, nbytes=nbytes, noun=noun)
        return _HeartbeatPhase(phase, title, self._heartbeat)


class _HeartbeatPhase:
    def __init__(self, phase: ProgressPhase, title: str, heartbeat: Heartbeat) -> None:
        self._phase, self._title, self._heartbeat = phase, title, heartbeat
        self._previous_activity = heartbeat.activity

    def advance(self, items: int = 0, nbytes: int = 0) -> None:
        raise_lost_interrupt()
        self._heartbeat.mark()
        self._phase.advance(items, nbytes)

    def __enter__(self) -> ProgressPhase:
        self._previous_activity, self._heartbeat.activity = self._heartbeat.activity, self._title
        self._heartbeat.mark()
        self._phase.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:  # after a failure, the phase stays the reported activity
            self._heartbeat.activity = self._previous_activity
        self._heartbeat.mark()
        self._phase.__exit__(*error)


class HeartbeatReduction:
    """A gradient reduction that records calls as signs of life: one per micro-batch, and those at a window's end."""

    def __init__(self, reduction: GradientReduction, heartbeat: Heartbeat) -> None:
        self._reduction, self._heartbeat = reduction, heartbeat

    def begin_backward(self, is_last: bool) -> None:
        self._heartbeat.activity = "training"
        self._heartbeat.mark(in_window=self._heartbeat.step > 0)  # torch.compile works in the first window
        self._reduction.begin_backward(is_last)

    def reduce_gradients(self, parameters: Iterable[nn.Parameter], loss: torch.Tensor) -> torch.Tensor:
        self._heartbeat.mark(in_window=self._heartbeat.step > 0)
        return self._reduction.reduce_gradients(parameters, loss)

    def global_norm(self, local_norm: torch.Tensor) -> torch.Tensor:
        return self._reduction.global_norm(local_norm)
