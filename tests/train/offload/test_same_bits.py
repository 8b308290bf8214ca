"""Correctness is not the plan's business: whatever a plan says, losses, weights, state and averages have the same bits.

On the CPU, where a device is the host itself and copies are made at once: what is moved where, dropped and fetched is
what a GPU's run does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from supertuner.plan.placement.plan import ActivationPolicy, OptimizerPlacement, WeightPlacement
from supertuner.step.window import WindowResult, held_out_losses
from tests.train.offload.making import (
    OffloadCase,
    a_plan,
    apply_plan_synchronously,
    assert_same,
    batch,
    block_names,
    outcome,
    plans,
    window,
)

WINDOWS = 3
CASES = {
    "lora": OffloadCase(),
    "lora in bf16": OffloadCase(precision="bf16"),
    "lokr": OffloadCase(kind="lokr"),
    "loha": OffloadCase(kind="loha", precision="bf16"),
    "full": OffloadCase(kind="full"),
    "full in bf16": OffloadCase(kind="full", precision="bf16"),
    "8 bits": OffloadCase(base="int8", precision="bf16"),
    "differences": OffloadCase(kind="diff"),
    "flux": OffloadCase(model="flux"),
    "flux, full": OffloadCase(model="flux", kind="full", precision="bf16"),
    "unet": OffloadCase(model="unet"),
    "unet, full": OffloadCase(model="unet", kind="full"),
    "fp16": OffloadCase(precision="fp16"),
    "automagic": OffloadCase(optimizer="automagic"),
    "automagic, full": OffloadCase(kind="full", optimizer="automagic"),
    "prodigy": OffloadCase(kind="full", optimizer="prodigy"),
    "schedule-free": OffloadCase(kind="full", optimizer="schedule_free", ema=False),
    "adafactor": OffloadCase(kind="full", optimizer="adafactor"),
    "8-bit state": OffloadCase(kind="full", optimizer="adamw8bit"),
}


@cache
def alone(name: str) -> tuple[list[WindowResult], torch.Tensor, dict[str, Any], int]:
    """The run without a plan."""
    case = CASES[name]
    trainee = case.expert_state()
    results = [window(trainee, case.step_options(), number) for number in range(WINDOWS)]
    looked = held_out_losses(trainee, [batch([50, 51])], case.step_options())
    return results, looked, outcome(trainee), len(block_names(trainee.module))


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_any_plan_gives_the_same_bits(name: str, data: st.DataObject) -> None:
    results, looked, left, blocks = alone(name)
    case = CASES[name]
    trainee = case.expert_state()
    acting = apply_plan_synchronously(trainee, a_plan(trainee.module, **data.draw(plans(blocks))))
    for number, wanted in enumerate(results):
        assert window(trainee, case.step_options(), number) == wanted
    assert torch.equal(held_out_losses(trainee, [batch([50, 51])], case.step_options()), looked)
    assert_same(outcome(trainee), left)
    acting.restore_to_device()
    assert_same(outcome(trainee), left)


@pytest.mark.parametrize("stepping", OptimizerPlacement)
@pytest.mark.parametrize(
    ("name", "fate"),
    [
        ("lora", ActivationPolicy.SEND),
        ("full in bf16", ActivationPolicy.KEEP),
        ("full in bf16", ActivationPolicy.SEND),
        ("full in bf16", ActivationPolicy.RECOMPUTE),
        ("8 bits", ActivationPolicy.KEEP),
        ("unet", ActivationPolicy.RECOMPUTE),
    ],
)
def test_everything_away_gives_the_same_bits(name: str, fate: ActivationPolicy, stepping: OptimizerPlacement) -> None:
    results, looked, left, _ = alone(name)
    case = CASES[name]
    trainee = case.expert_state()
    apply_plan_synchronously(
        trainee, a_plan(trainee.module, WeightPlacement.STREAMED, fate, ahead=1, stepping=stepping)
    )
    for number, wanted in enumerate(results):
        assert window(trainee, case.step_options(), number) == wanted
    assert torch.equal(held_out_losses(trainee, [batch([50, 51])], case.step_options()), looked)
    assert_same(outcome(trainee), left)
