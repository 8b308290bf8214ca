"""What rooms tell the world while they work: events to a sink, progress to a display. Nothing reads them to decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol, TypeAlias

from supertuner.core.types import JSON


@dataclass(frozen=True, slots=True)
class DecisionEvent:
    """Something was chosen at run time; saved in the run's `decisions.json`."""

    what: str
    """A path-like name: `datasets[cats].in_memory.compression`."""
    value: JSON
    reason: str


@dataclass(frozen=True, slots=True)
class WarningEvent:
    """Something works but is unwise, or has no effect here."""

    what: str
    message: str


@dataclass(frozen=True, slots=True)
class NoteEvent:
    """Something happened that people follow in a log: the ramp moved on, a checkpoint was saved."""

    what: str
    message: str


@dataclass(frozen=True, slots=True)
class SetAsideEvent:
    """A file that is not used, and why. The file itself is never touched."""

    dataset: str
    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class MeasurementEvent:
    """Figures of something that happened, taken by a clock or a counter."""

    what: str
    figures: Mapping[str, JSON] = field(default_factory=dict)


MEMORY_MEASUREMENT: Final = "memory"
"""The name of a measurement of the machine's memory: who takes it and who shows it do not know each other."""

Event: TypeAlias = DecisionEvent | WarningEvent | NoteEvent | SetAsideEvent | MeasurementEvent


class Sink(Protocol):
    def emit(self, event: Event, /) -> None: ...


class ProgressPhase(Protocol):
    """One stretch of work with a known end. A context manager: leaving it ends the display."""

    def advance(self, items: int = 0, nbytes: int = 0) -> None: ...

    def __enter__(self) -> ProgressPhase: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Progress(Protocol):
    def phase(self, title: str, *, items: int = 0, nbytes: int = 0, noun: str = "files") -> ProgressPhase:
        """Begin a phase of `items` things (called `noun`) and `nbytes` bytes; a zero total is not shown."""


class NullSink:
    """The sink and progress of code that has nobody to talk to."""

    def emit(self, event: Event, /) -> None:
        pass

    def phase(self, title: str, *, items: int = 0, nbytes: int = 0, noun: str = "files") -> ProgressPhase:
        return _NullPhase()


class _NullPhase:
    def advance(self, items: int = 0, nbytes: int = 0) -> None:
        pass

    def __enter__(self) -> ProgressPhase:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class TeeSink:
    """One sink in front of several."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def emit(self, event: Event, /) -> None:
        for sink in self._sinks:
            sink.emit(event)
