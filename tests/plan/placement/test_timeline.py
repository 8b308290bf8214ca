"""A timeline shows a trace as it is: every moment's bytes, in the time that the work takes."""

from __future__ import annotations

import numpy as np
import pytest

from supertuner.plan.placement.step_table import Work
from supertuner.plan.placement.timeline import IDLE, timeline
from supertuner.plan.trace.record import Kind, Pass, Stretch, Trace


def a_trace() -> Trace:
    """A weight of 8, an activation of 4 from the forward to the backward pass, temporaries of 2 in both."""
    rows = [(8, 0, 8, Kind.FROZEN), (4, 1, 6, Kind.ACTIVATION), (2, 2, 3, Kind.TEMPORARY), (2, 4, 5, Kind.TEMPORARY)]
    stretches = (
        Stretch(0, Pass.FORWARD, 1, 4, Work(10.0, operators=2), (0, 1, 2)),
        Stretch(0, Pass.RECOMPUTE, 4, 5, Work(10.0, operators=1), (3,)),
        Stretch(0, Pass.BACKWARD, 5, 7, Work(30.0, operators=3), (1,)),
        Stretch(0, Pass.UPDATE, 7, 8, Work(1.0, operators=1), (0,)),
    )
    columns = list(zip(*rows, strict=True))
    return Trace(
        phase="train model",
        device="cpu",
        granule=1,
        blocks=("(before)",),
        nbytes=np.array(columns[0], np.int64),
        birth=np.array(columns[1], np.int64),
        death=np.array(columns[2], np.int64),
        kind=np.array(columns[3], np.uint8),
        block=np.zeros(4, np.int16),
        stretches=stretches,
        end=8,
        inputs=np.zeros((0, 2), np.int64),
    )


def test_every_moment_has_the_bytes_of_the_trace() -> None:
    trace = a_trace()
    line = timeline(trace, None)
    total = sum(line.bytes_by_class.values())
    assert np.array_equal(total, trace.live()[: trace.end])
    assert float(np.max(total)) == trace.peak()[0] == 14


def test_time_is_the_works_and_never_runs_backwards() -> None:
    line = timeline(a_trace(), lambda work: work.matmul_flops / 10)
    assert line.in_seconds
    assert (np.diff(line.edges) >= 0).all()
    assert line.edges[-1] == pytest.approx(5.1)
    assert [(span.name, span.begin, span.end) for span in line.spans] == [
        ("forward", 0.0, pytest.approx(1.0)),
        ("backward", pytest.approx(1.0), pytest.approx(5.0)),
        ("update", pytest.approx(5.0), pytest.approx(5.1)),
    ]


def test_without_a_machine_operators_are_counted() -> None:
    line = timeline(a_trace(), None)
    assert not line.in_seconds and line.edges[-1] == pytest.approx(7)


def test_experts_that_wait_lie_below_everything() -> None:
    line = timeline(a_trace(), None, idle_bytes=100)
    assert (line.bytes_by_class[IDLE] == 100).all()
