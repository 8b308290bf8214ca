"""The memory of a traced step from moment to moment, by class, against the time that the model gives its work. Pure.

Moments are the births and deaths of the trace. A stretch of operators takes the time that its work takes on a machine,
spread evenly over its moments; without a machine, the axis counts operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from supertuner.plan.placement.step_table import OperatorWork
from supertuner.plan.trace.execution_trace import ExecutionTrace, StepPass, TensorKind

Floats = NDArray[np.float64]
WorkSeconds = Callable[[OperatorWork], float]

IDLE_EXPERTS = "idle experts"
_PASS_NAMES = {
    StepPass.FORWARD: "forward",
    StepPass.RECOMPUTE: "backward",
    StepPass.BACKWARD: "backward",
    StepPass.UPDATE: "update",
}
"""Recomputing is a part of the backward pass: it comes in pieces, a block each."""


@dataclass(frozen=True, slots=True)
class PassInterval:
    """A part of the step with a name."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, eq=False, slots=True)
class MemoryTimeline:
    edges: Floats
    """Where each moment begins, and where the last one ends; never falling."""
    bytes_by_class: dict[str, Floats]
    passes: tuple[PassInterval, ...]
    in_seconds: bool
    """Otherwise the axis counts operators."""


def build_timeline(trace: ExecutionTrace, seconds_of: WorkSeconds | None, idle_bytes: int = 0) -> MemoryTimeline:
    """`idle_bytes` are of experts that wait on the GPU while this one is trained."""
    edges, passes = _edges_and_passes(trace, seconds_of)
    bytes_by_class = {kind.label: trace.live_bytes_of_kind(kind)[: trace.end].astype(np.float64) for kind in TensorKind}
    if idle_bytes:
        bytes_by_class[IDLE_EXPERTS] = np.full(trace.end, float(idle_bytes))
    return MemoryTimeline(edges, bytes_by_class, passes, seconds_of is not None)


def _edges_and_passes(trace: ExecutionTrace, seconds_of: WorkSeconds | None) -> tuple[Floats, tuple[PassInterval, ...]]:
    """Moments between two stretches take no time."""
    lengths = np.zeros(trace.end)
    marks: list[tuple[str, int, int]] = []
    for stretch in trace.spans:
        span_length = float(stretch.work.operators) if seconds_of is None else seconds_of(stretch.work)
        moments = max(1, stretch.end - stretch.begin)
        begin = min(stretch.begin, trace.end - 1)
        lengths[begin : begin + moments] += span_length / moments
        name = _PASS_NAMES[stretch.step_pass]
        if marks and marks[-1][0] == name:
            marks[-1] = (name, marks[-1][1], stretch.end)
        else:
            marks.append((name, stretch.begin, stretch.end))
    edges = np.concatenate([[0.0], np.cumsum(lengths)])
    return edges, tuple(
        PassInterval(name, float(edges[begin]), float(edges[min(end, trace.end)])) for name, begin, end in marks
    )
