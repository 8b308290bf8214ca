"""What counts is whether a step runs on a GPU of that size: forecasts and plans count what torch's allocator reserves.

Each window runs in a process of its own: what an earlier one leaves in the allocator would change the figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supertuner.plan.trace.caching_allocator import AllocatorPeaks, simulate_allocator
from supertuner.plan.trace.cuda_kernels import CudaDevice
from supertuner.plan.trace.trace_training_step import trace_training_step
from tests.phantom.full_size import GIB, _described, chip
from tests.phantom.random_cases import random_case

LARGE_GPU = 200 * GIB
EXPECTED_ERROR = 0.01
"""Of the modelled reserved bytes of a planned step; plans leave as much free."""
SMALL_SEED = 7
"""A random window of half a gigabyte."""
QUICK = (("Wan, 6 layers", 12.0, "gh200-96"), ("Flux, 9 layers", 12.0, "gh200-96"))
LONG = (
    ("Wan stills, 6 layers", 16.0, "gb10"),
    ("Qwen-Image, 6 layers", 12.0, "gh200-96"),
    ("Qwen-Image, 6 layers", 14.0, "gb10"),
    ("SD3.5, 6 layers", 10.0, "h100-80-pcie"),
    ("SD3.5, 6 layers", 8.0, "gh200-96"),
    ("SD3.5, all weights", 4.4, "gh200-96"),
    ("SD3.5, all weights", 3.0, "gh200-96"),
    ("SD3.5, all weights", 4.4, "h100-80-pcie"),
)
"""(case, GiB that the plan is made for, machine): sent, streamed and recomputed blocks; steps on the GPU, in pieces and
on the host."""


def on_a_gpu(nbytes: int, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *command],
        env={**os.environ, "FAKECUDA_HBM": str(nbytes), "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )


def planned_run(title: str, budget_bytes: int, machine: str, *more: str) -> dict[str, Any]:
    command = ("tests.phantom.planned_full_size", "--json", title, str(budget_bytes), machine, *more)
    done = on_a_gpu(LARGE_GPU, *command)
    assert done.returncode == 0, done.stderr[-2000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def check_plan(title: str, gib: float, machine: str) -> dict[str, Any]:
    budget = int(gib * GIB)
    found = planned_run(title, budget, machine)
    assert found["reserved"] <= budget, found
    assert found["planned_reserved"] == pytest.approx(found["reserved"], rel=EXPECTED_ERROR)
    assert found["plan"] != "everything stays on the device", "nothing was planned, so nothing was tested"
    return found


@pytest.mark.parametrize(("title", "gib", "machine"), QUICK)
def test_a_plan_reserves_no_more_than_it_was_made_for(title: str, gib: float, machine: str) -> None:
    check_plan(title, gib, machine)


def test_a_plan_that_counts_live_bytes_reserves_more_than_it_was_made_for() -> None:
    """The test above would notice: on a GPU of that size, such a plan runs out or stalls."""
    title, gib, machine = QUICK[0]
    found = planned_run(title, int(gib * GIB), machine, "--live-bytes")
    assert found["live"] <= gib * GIB < found["reserved"]


@pytest.mark.phantom_long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("title", "gib", "machine"), LONG)
def test_every_kind_of_plan_reserves_no_more_than_it_was_made_for(title: str, gib: float, machine: str) -> None:
    check_plan(title, gib, machine)


def least_memory(simulate: Callable[[int], AllocatorPeaks], begin: int, end: int) -> int:
    """The least memory, to 0.1 %, on which the model says that a step runs."""
    assert not simulate(begin).fits and simulate(end).fits
    while end - begin > end // 1000:
        middle = (begin + end) // 2
        begin, end = (begin, middle) if simulate(middle).fits else (middle, end)
    return end


def test_a_step_runs_on_a_gpu_if_the_forecast_says_so() -> None:
    """Between its live bytes and the bytes that it reserves on a large GPU, a step may run or not: torch releases
    cached memory when the GPU is full. The forecast models that."""
    case = random_case(SMALL_SEED)
    trace = trace_training_step(*_described(case), micro_batches=case.micro_batches, device=CudaDevice(chip=chip()))
    unlimited = simulate_allocator(trace)
    least = least_memory(
        lambda nbytes: simulate_allocator(trace, limit_bytes=nbytes),
        int(unlimited.allocated_bytes * 0.95),
        unlimited.reserved_bytes,
    )
    assert unlimited.allocated_bytes < least < unlimited.reserved_bytes
    command = ("tests.phantom.full_size", "--json", f"seed {SMALL_SEED}")
    runs, runs_out = on_a_gpu(int(1.02 * least), *command), on_a_gpu(int(0.94 * least), *command)
    assert runs.returncode == 0, runs.stderr[-2000:]
    assert runs_out.returncode != 0 and "OutOfMemoryError" in runs_out.stderr
