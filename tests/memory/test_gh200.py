"""The seeds' names do what they say, and the ramp changes only where a window begins."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supertuner import gh200
from supertuner.gh200 import GH200GradientRamp
from supertuner.optim.schedule import BatchRamp, windows
from tests.fakes.building import ROOT, environment

SEEDS = (
    "gh200_uvm_enabled",
    "set_uvm_hint_override",
    "prefer_cpu_residency",
    "prefer_gpu_residency",
    "prefetch_to_device",
    "optimize_batch_for_gh200",
    "GH200GradientRamp",
)


@pytest.mark.parametrize("name", SEEDS)
def test_the_names_of_the_seeds_are_here(name: str) -> None:
    assert name in gh200.__all__
    assert callable(getattr(gh200, name))


def test_importing_it_wakes_no_driver() -> None:
    code = "import supertuner.gh200; print('libcuda.so' in open('/proc/self/maps').read())"
    env = environment()
    assert subprocess.check_output([sys.executable, "-c", code], env=env, cwd=ROOT, text=True).split() == ["False"]


def sizes(ramp: GH200GradientRamp, micro_batches: int) -> list[int]:
    """The windows that a loop with this ramp makes: micro-batches until the optimizer steps."""
    made, filled = [], 0
    for micro in range(micro_batches):
        filled += 1
        if ramp.ends_window(micro):
            made.append(filled)
            filled = 0
    return made


def test_the_example_of_the_seeds_grows_as_the_trainer_grows() -> None:
    ramp = GH200GradientRamp(4, 32, 400, train_batch_size=1, world_size=1)
    ours = [len(window) for window in windows(2000, BatchRamp(4, 32, 400))][:80]
    assert sizes(ramp, 2000)[:80] == ours
    assert [ramp.gradient_accumulation_steps(micro) for micro in (0, 15, 16, 424, 425, 10**9)] == [4, 4, 5, 31, 32, 32]


ramps = st.builds(
    lambda start, more, steps, *share: (GH200GradientRamp(start, start + more, steps, *share), *share),
    st.integers(1, 16), st.integers(0, 48), st.integers(1, 300), st.integers(1, 4), st.integers(1, 4),
)  # fmt: skip


@given(ramps)
def test_every_window_has_the_number_it_was_given_from_its_first_micro_batch_on(
    given_ramp: tuple[GH200GradientRamp, int, int],
) -> None:
    ramp, _, _ = given_ramp
    micro = 0
    while micro < 600:
        steps = ramp.gradient_accumulation_steps(micro)
        assert ramp.begins_window(micro)
        assert [ramp.gradient_accumulation_steps(micro + i) for i in range(steps)] == [steps] * steps
        assert [ramp.ends_window(micro + i) for i in range(steps)] == [False] * (steps - 1) + [True]
        micro += steps


@given(ramps)
def test_a_window_is_as_large_as_asked_over_all_processes_and_never_a_micro_batch_more(
    given_ramp: tuple[GH200GradientRamp, int, int],
) -> None:
    ramp, batch, world = given_ramp
    for steps, wanted in (
        (ramp.gradient_accumulation_steps(0), ramp.ramp.start),
        (ramp.gradient_accumulation_steps(10**9), ramp.ramp.end),
    ):
        assert steps * batch * world >= wanted
        assert (steps - 1) * batch * world < wanted


@given(ramps)
def test_it_never_falls(given_ramp: tuple[GH200GradientRamp, int, int]) -> None:
    ramp, _, _ = given_ramp
    steps = [ramp.gradient_accumulation_steps(micro) for micro in range(0, 2000, 7)]
    assert steps == sorted(steps)
