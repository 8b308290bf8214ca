"""Events (to a sink) and progress (to a display) that packages report while they work. No code depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from supertuner.core.types import JSON


@dataclass(frozen=True, slots=True)
class DecisionEvent:
    """A choice made at run time, with its reason; saved in the run's `decisions.json`."""

    what: str
    """A path-like name: `datasets[cats].in_memory.compression`."""
    value: JSON
    reason: str


@dataclass(frozen=True, slots=True)
class WarningEvent:
    """Something works but is unwise, or has no effect."""

    what: str
    message: str


@dataclass(frozen=True, slots=True)
class NoteEvent:
    """Something happened that people want to read in a log: a ramp step, a saved checkpoint."""

    what: str
    message: str


@dataclass(frozen=True, slots=True)
class SetAsideEvent:
    """A file is not used, with the reason. The file itself is never changed."""

    dataset: str
    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class MeasurementEvent:
    """Figures measured with a clock or a counter."""

    what: str
    figures: Mapping[str, JSON] = field(default_factory=dict)


MEMORY_MEASUREMENT: Final = "memory"
"""Name of a measurement of the machine's memory; shared by the code that measures and the sinks that show it."""

Event: TypeAlias = DecisionEvent | WarningEvent | NoteEvent | SetAsideEvent | MeasurementEvent


class Sink(Protocol):
    def emit(self, event: Event, /) -> None: ...


class ProgressPhase(AbstractContextManager["ProgressPhase"], Protocol):
    """A phase of work whose progress is shown. A context manager: leaving it ends the display."""

    def advance(self, items: int = 0, nbytes: int = 0) -> None: ...


class Progress(Protocol):
    def phase(self, title: str, *, items: int = 0, nbytes: int = 0, noun: str = "files") -> ProgressPhase:
        """Begin a phase of `items` items (called `noun`) and `nbytes` bytes; a total of 0 is not shown."""


class NullSink:
    """A sink and progress display that discards everything."""

    def emit(self, event: Event, /) -> None:
        pass

    def phase(self, title: str, *, items: int = 0, nbytes: int = 0, noun: str = "files") -> ProgressPhase:
        return _NullPhase()


class _NullPhase(ProgressPhase):
    def advance(self, items: int = 0, nbytes: int = 0) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class TeeSink:
    """Passes each event to several sinks, in order."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def emit(self, event: Event, /) -> None:
        for sink in self._sinks:
            sink.emit(event)
