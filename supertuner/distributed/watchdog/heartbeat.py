"""Signs of life of the thread that trains: what it is doing, and when it last came on.

They are given off by what happens anyway: events, progress, the passes of a window. Nobody waits for them to be read.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import nn

from supertuner.core.events import Event, Measured, Phase, Progress, Sink
from supertuner.sinks.training import STEP
from supertuner.step.window import Reduction


@dataclass(slots=True)
class Pulse:
    """Written by the thread that works, read by the one that watches; a torn read is a moment old, no more."""

    doing: str = "starting"
    step: int = 0
    """Steps done: the same count in all processes."""
    at: float = 0.0
    """When it last came on, by the monotonic clock."""
    marks: int = 0
    in_pass: bool = False
    """In the passes of a window: there it comes on with each micro-batch, or it hangs. Elsewhere work that is silent
    for long, a download, a compiler, is told from a hang by what it takes of the machine."""

    def mark(self, *, in_pass: bool = False) -> None:
        self.at, self.in_pass = time.monotonic(), in_pass
        self.marks += 1


class MarkedSink:
    """A sink whose events are signs of life."""

    def __init__(self, sink: Sink, pulse: Pulse) -> None:
        self._sink, self._pulse = sink, pulse

    def emit(self, event: Event, /) -> None:
        if isinstance(event, Measured) and event.what == STEP:
            step = event.figures["step"]
            assert isinstance(step, int)
            self._pulse.step = step
        self._pulse.mark()
        self._sink.emit(event)


class MarkedProgress:
    """Progress that is a sign of life, and says what is being done."""

    def __init__(self, progress: Progress, pulse: Pulse) -> None:
        self._progress, self._pulse = progress, pulse

    def phase(self, title: str, *, items: int = 0, nbytes: int = 0, noun: str = "files") -> Phase:
        return _MarkedPhase(self._progress.phase(title, items=items, nbytes=nbytes, noun=noun), title, self._pulse)


class _MarkedPhase:
    def __init__(self, phase: Phase, title: str, pulse: Pulse) -> None:
        self._phase, self._title, self._pulse = phase, title, pulse
        self._before = pulse.doing

    def advance(self, items: int = 0, nbytes: int = 0) -> None:
        self._pulse.mark()
        self._phase.advance(items, nbytes)

    def __enter__(self) -> Phase:
        self._before, self._pulse.doing = self._pulse.doing, self._title
        self._pulse.mark()
        self._phase.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # a phase that failed stays what was being done
            self._pulse.doing = self._before
        self._pulse.mark()
        self._phase.__exit__(kind, error, trace)


class MarkedReduction:
    """A reduction whose calls are signs of life: one for each micro-batch, and those at a window's end."""

    def __init__(self, reduction: Reduction, pulse: Pulse) -> None:
        self._reduction, self._pulse = reduction, pulse

    def begin(self, last: bool) -> None:
        self._pulse.doing = "training"
        self._pulse.mark(in_pass=self._pulse.step > 0)  # the first window may wait for a compiler
        self._reduction.begin(last)

    def add(self, parameters: Iterable[nn.Parameter], loss: torch.Tensor) -> torch.Tensor:
        self._pulse.mark(in_pass=self._pulse.step > 0)
        return self._reduction.add(parameters, loss)

    def norm(self, norm: torch.Tensor) -> torch.Tensor:
        return self._reduction.norm(norm)
