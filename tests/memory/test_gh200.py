"""The names of the GH200 forks work, and the ramp changes only where a window begins."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supertuner import gh200
from supertuner.gh200 import GH200GradientRamp
from supertuner.optim.schedule import BatchRamp, windows
from tests.fakes.fake_libraries import ROOT, environment

FORK_NAMES = (
    "gh200_uvm_enabled",
    "set_uvm_hint_override",
    "prefer_cpu_residency",
    "prefer_gpu_residency",
    "prefetch_to_device",
    "optimize_batch_for_gh200",
    "GH200GradientRamp",
)


@pytest.mark.parametrize("name", FORK_NAMES)
def test_the_names_of_the_forks_exist(name: str) -> None:
    assert name in gh200.__all__
    assert callable(getattr(gh200, name))


def test_importing_it_does_not_load_the_driver() -> None:
    code = "import supertuner.gh200; print('libcuda.so' in open('/proc/self/maps').read())"
    env = environment()
    assert subprocess.check_output([sys.executable, "-c", code], env=env, cwd=ROOT, text=True).split() == ["False"]


def sizes(ramp: GH200GradientRamp, micro_batches: int) -> list[int]:
    """The window sizes of a loop with this ramp: micro-batches per optimizer step."""
    window_sizes, filled = [], 0
    for micro in range(micro_batches):
        filled += 1
        if ramp.ends_window(micro):
            window_sizes.append(filled)
            filled = 0
    return window_sizes


def test_the_example_of_the_forks_grows_like_the_trainers_windows() -> None:
    ramp = GH200GradientRamp(4, 32, 400, train_batch_size=1, world_size=1)
    ours = [len(window) for window in windows(2000, BatchRamp(4, 32, 400))][:80]
    assert sizes(ramp, 2000)[:80] == ours
    assert [ramp.gradient_accumulation_steps(micro) for micro in (0, 15, 16, 424, 425, 10**9)] == [4, 4, 5, 31, 32, 32]


ramps = st.builds(
    lambda start, more, steps, *share: (GH200GradientRamp(start, start + more, steps, *share), *share),
    st.integers(1, 16), st.integers(0, 48), st.integers(1, 300), st.integers(1, 4), st.integers(1, 4),
)  # fmt: skip


@given(ramps)
def test_the_accumulation_steps_are_constant_within_a_window(
    ramp_case: tuple[GH200GradientRamp, int, int],
) -> None:
    ramp, _, _ = ramp_case
    micro = 0
    while micro < 600:
        steps = ramp.gradient_accumulation_steps(micro)
        assert ramp.begins_window(micro)
        assert [ramp.gradient_accumulation_steps(micro + i) for i in range(steps)] == [steps] * steps
        assert [ramp.ends_window(micro + i) for i in range(steps)] == [False] * (steps - 1) + [True]
        micro += steps


@given(ramps)
def test_a_window_has_the_requested_size_over_all_processes_rounded_up_to_micro_batches(
    ramp_case: tuple[GH200GradientRamp, int, int],
) -> None:
    ramp, batch, world = ramp_case
    for steps, wanted in (
        (ramp.gradient_accumulation_steps(0), ramp.ramp.start),
        (ramp.gradient_accumulation_steps(10**9), ramp.ramp.end),
    ):
        assert steps * batch * world >= wanted
        assert (steps - 1) * batch * world < wanted


@given(ramps)
def test_the_accumulation_steps_never_decrease(ramp_case: tuple[GH200GradientRamp, int, int]) -> None:
    ramp, _, _ = ramp_case
    steps = [ramp.gradient_accumulation_steps(micro) for micro in range(0, 2000, 7)]
    assert steps == sorted(steps)
