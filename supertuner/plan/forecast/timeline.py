"""The memory of a traced step over time, by class of tensor, against modelled time: the data of the estimate's picture.
Pure.

The time axis has one interval for each allocation or release in the trace. The modelled time of a span of operators is
spread evenly over its intervals. If the machine's rates are unknown, the axis counts operators instead of seconds.
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


@dataclass(frozen=True, slots=True)
class PassInterval:
    """When the forward pass, the backward pass or the update runs."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, eq=False, slots=True)
class MemoryTimeline:
    edges: Floats
    """The begin of each interval and the end of the last one; never decreasing."""
    bytes_by_class: dict[str, Floats]
    """For each class of tensor, the live bytes in each interval."""
    passes: tuple[PassInterval, ...]
    in_seconds: bool
    """False: the axis counts operators."""


def build_timeline(trace: ExecutionTrace, seconds_of: WorkSeconds | None, idle_bytes: int = 0) -> MemoryTimeline:
    """`seconds_of`: modelled time of some work; None: unknown. `idle_bytes`: experts that wait on the GPU meanwhile."""
    edges, passes = _edges_and_passes(trace, seconds_of)
    bytes_by_class = {kind.label: trace.live_bytes_of_kind(kind)[: trace.end].astype(np.float64) for kind in TensorKind}
    if idle_bytes:
        bytes_by_class[IDLE_EXPERTS] = np.full(trace.end, float(idle_bytes))
    return MemoryTimeline(edges, bytes_by_class, passes, seconds_of is not None)


def _edges_and_passes(trace: ExecutionTrace, seconds_of: WorkSeconds | None) -> tuple[Floats, tuple[PassInterval, ...]]:
    """Intervals between two spans have length 0."""
    lengths = np.zeros(trace.end)
    marks: list[tuple[str, int, int]] = []
    for span in trace.spans:
        span_length = float(span.work.operators) if seconds_of is None else seconds_of(span.work)
        ticks = max(1, span.end - span.begin)
        begin = min(span.begin, trace.end - 1)
        lengths[begin : begin + ticks] += span_length / ticks
        # Recomputation counts as part of the backward pass: it alternates with it, block by block.
        name = "backward" if span.step_pass is StepPass.RECOMPUTE else span.step_pass.name.lower()
        if marks and marks[-1][0] == name:
            marks[-1] = (name, marks[-1][1], span.end)
        else:
            marks.append((name, span.begin, span.end))
    edges = np.concatenate([[0.0], np.cumsum(lengths)])
    times = edges.tolist()
    return edges, tuple(PassInterval(name, times[begin], times[min(end, trace.end)]) for name, begin, end in marks)
