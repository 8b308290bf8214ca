"""A timeline has the trace's bytes in every interval, and the modelled time of its work."""

from __future__ import annotations

import numpy as np
import pytest

from supertuner.plan.forecast.timeline import IDLE_EXPERTS, build_timeline
from supertuner.plan.placement.step_table import OperatorWork
from supertuner.plan.trace.execution_trace import ExecutionTrace, StepPass, TensorKind, TraceSpan


def a_trace() -> ExecutionTrace:
    """A weight of 8 bytes, an activation of 4 from the forward to the backward pass, temporaries of 2 in both."""
    rows = [
        (8, 0, 8, TensorKind.FROZEN),
        (4, 1, 6, TensorKind.ACTIVATION),
        (2, 2, 3, TensorKind.TEMPORARY),
        (2, 4, 5, TensorKind.TEMPORARY),
    ]
    spans = (
        TraceSpan(0, StepPass.FORWARD, 1, 4, OperatorWork(10.0, operators=2), (0, 1, 2)),
        TraceSpan(0, StepPass.RECOMPUTE, 4, 5, OperatorWork(10.0, operators=1), (3,)),
        TraceSpan(0, StepPass.BACKWARD, 5, 7, OperatorWork(30.0, operators=3), (1,)),
        TraceSpan(0, StepPass.UPDATE, 7, 8, OperatorWork(1.0, operators=1), (0,)),
    )
    columns = list(zip(*rows, strict=True))
    return ExecutionTrace(
        phase="train model",
        device="cpu",
        alignment_bytes=1,
        blocks=("(before)",),
        nbytes=np.array(columns[0], np.int64),
        birth=np.array(columns[1], np.int64),
        death=np.array(columns[2], np.int64),
        kind=np.array(columns[3], np.uint8),
        block=np.zeros(4, np.int16),
        spans=spans,
        end=8,
        block_inputs=np.zeros((0, 2), np.int64),
    )


def test_every_interval_has_the_bytes_of_the_trace() -> None:
    trace = a_trace()
    line = build_timeline(trace, None)
    total = sum(line.bytes_by_class.values())
    assert np.array_equal(total, trace.live_bytes()[: trace.end])
    assert float(np.max(total)) == trace.peak()[0] == 14


def test_the_time_axis_is_the_modelled_time_and_never_decreases() -> None:
    line = build_timeline(a_trace(), lambda work: work.matmul_flops / 10)
    assert line.in_seconds
    assert (np.diff(line.edges) >= 0).all()
    assert line.edges[-1] == pytest.approx(5.1)
    assert [(span.name, span.begin, span.end) for span in line.passes] == [
        ("forward", 0.0, pytest.approx(1.0)),
        ("backward", pytest.approx(1.0), pytest.approx(5.0)),
        ("update", pytest.approx(5.0), pytest.approx(5.1)),
    ]


def test_without_known_rates_the_axis_counts_operators() -> None:
    line = build_timeline(a_trace(), None)
    assert not line.in_seconds and line.edges[-1] == pytest.approx(7)


def test_idle_experts_are_a_constant_class() -> None:
    line = build_timeline(a_trace(), None, idle_bytes=100)
    assert (line.bytes_by_class[IDLE_EXPERTS] == 100).all()
