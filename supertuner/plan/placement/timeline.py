"""The memory of a traced step from moment to moment, by class, against the time that the model gives its work. Pure.

Moments are the births and deaths of the trace. A stretch of operators takes the time that its work takes on a machine,
spread evenly over its moments; without a machine, the axis counts operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from supertuner.plan.placement.step_table import Work
from supertuner.plan.trace.record import Kind, Pass, Trace

Floats = NDArray[np.float64]
Seconds = Callable[[Work], float]

IDLE = "idle experts"
_NAMES = {Pass.FORWARD: "forward", Pass.RECOMPUTE: "backward", Pass.BACKWARD: "backward", Pass.UPDATE: "update"}
"""Recomputing is a part of the backward pass: it comes in pieces, a block each."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the step with a name."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, eq=False, slots=True)
class Timeline:
    edges: Floats
    """Where each moment begins, and where the last one ends; never falling."""
    bytes_by_class: dict[str, Floats]
    spans: tuple[Span, ...]
    in_seconds: bool
    """Otherwise the axis counts operators."""


def timeline(trace: Trace, seconds_of: Seconds | None, idle_bytes: int = 0) -> Timeline:
    """`idle_bytes` are of experts that wait on the GPU while this one is trained."""
    edges, spans = _edges(trace, seconds_of)
    found = {kind.text: trace.live_of(kind)[: trace.end].astype(np.float64) for kind in Kind}
    if idle_bytes:
        found[IDLE] = np.full(trace.end, float(idle_bytes))
    return Timeline(edges, found, spans, seconds_of is not None)


def _edges(trace: Trace, seconds_of: Seconds | None) -> tuple[Floats, tuple[Span, ...]]:
    """Moments between two stretches take no time."""
    lengths = np.zeros(trace.end)
    marks: list[tuple[str, int, int]] = []
    for stretch in trace.stretches:
        took = float(stretch.work.operators) if seconds_of is None else seconds_of(stretch.work)
        moments = max(1, stretch.end - stretch.begin)
        begin = min(stretch.begin, trace.end - 1)
        lengths[begin : begin + moments] += took / moments
        name = _NAMES[stretch.during]
        if marks and marks[-1][0] == name:
            marks[-1] = (name, marks[-1][1], stretch.end)
        else:
            marks.append((name, stretch.begin, stretch.end))
    edges = np.concatenate([[0.0], np.cumsum(lengths)])
    return edges, tuple(
        Span(name, float(edges[begin]), float(edges[min(end, trace.end)])) for name, begin, end in marks
    )
