"""Simulated jobs for tests: the records that a machine with known noise would produce."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from supertuner.tools.baseline.record import MeasuredJob, MeasuredStep, StartupTimes
from supertuner.tools.baseline.store import Baseline

MIB = 1 << 20


def job(
    *,
    steps: int = 100,
    step_s: float = 0.1,
    noise: float = 0.02,
    seed: int = 0,
    load: Callable[[int], float] = lambda at: 1.0,
    loss: Callable[[int], float | None] = lambda at: 1.0 / (at + 1),
    first_step_s: float = 8.0,
    cold: bool = False,
    peaks: Mapping[str, int] | None = None,
    hints: Mapping[str, int] | None = None,
    windows: Sequence[int] = (4,),
    between_s: float = 0.001,
) -> MeasuredJob:
    """A job whose steps take `step_s` with log-normal `noise`; `load` is the machine's slowdown at each step."""
    draw = random.Random(seed)
    measured = []
    for at in range(steps):
        seconds = step_s * load(at) * draw.lognormvariate(0, noise)
        window = windows[at % len(windows)]
        expert = "high_noise" if at % 2 == 0 else "low_noise"
        measured.append(MeasuredStep(at + 1, window, expert, loss(at), seconds, 0.0, seconds + between_s))
    return MeasuredJob(
        steps=tuple(measured),
        start=StartupTimes(first_step_s - step_s, first_step_s, cold),
        peaks=peaks if peaks is not None else {"process.resident": 500 * MIB},
        hints=hints or {},
        memory=("residency hints off: the run computes on cpu",),
        losses="0" * 32,
        versions={"supertuner": "0.1.0", "torch": "2.13"},
        code="/code/supertuner",
        seconds=60.0,
    )


def jobs(count: int = 3, *, apart: float = 0.005, seed: int = 0, step_s: float = 0.1, **more: Any) -> list[MeasuredJob]:
    """Repeats of a job; the step times of two processes differ by `apart` (log-normal)."""
    draw = random.Random(seed)
    return [job(step_s=step_s * draw.lognormvariate(0, apart), seed=seed * 100 + at, **more) for at in range(count)]


def baseline(name: str = "one", **more: Any) -> Baseline:
    fields: dict[str, Any] = {
        "name": name,
        "captured_at": "2026-01-31T09:30:00+00:00",
        "steps": 100,
        "jobs": tuple(jobs()),
        "cold_start_s": 21.0,
        "machine": {"title": "a CPU without a GPU", "cpu": "Xeon", "cpus": 2, "arch": "x86_64", "gpus": []},
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "config": {"train": {"max_steps": 100}},
        "resolved": {"train": {"max_steps": 100, "mixed_precision": "fp32"}},
        "environment": {"OMP_NUM_THREADS": "1"},
        "notes": ("no nvidia-smi here",),
    }
    return Baseline(**(fields | more))
