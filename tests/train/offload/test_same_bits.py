"""Losses, weights, optimizer state and averages have the same bits under any offload plan.

On the CPU, where the device is the host itself and copies are synchronous: tensors are moved, dropped and fetched as in
a run on a GPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from supertuner.plan.placement.plan import ActivationPolicy, OptimizerPlacement, WeightPlacement
from supertuner.step.train_step import WindowResult, held_out_losses
from tests.train.offload.making import (
    OffloadCase,
    a_plan,
    apply_plan_synchronously,
    assert_same,
    batch,
    block_names,
    outcome,
    plans,
    restore_to_device,
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
    """A run without a plan."""
    case = CASES[name]
    expert_state = case.expert_state()
    results = [window(expert_state, case.step_options(), number) for number in range(WINDOWS)]
    looked = held_out_losses(expert_state, [batch([50, 51])], case.step_options())
    return results, looked, outcome(expert_state), len(block_names(expert_state.module))


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_any_plan_gives_the_same_bits(name: str, data: st.DataObject) -> None:
    results, looked, left, blocks = alone(name)
    case = CASES[name]
    expert_state = case.expert_state()
    offloaded = apply_plan_synchronously(expert_state, a_plan(expert_state.module, **data.draw(plans(blocks))))
    for number, wanted in enumerate(results):
        assert window(expert_state, case.step_options(), number) == wanted
    assert torch.equal(held_out_losses(expert_state, [batch([50, 51])], case.step_options()), looked)
    assert_same(outcome(expert_state), left)
    restore_to_device(offloaded)
    assert_same(outcome(expert_state), left)


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
def test_offloading_everything_gives_the_same_bits(
    name: str, fate: ActivationPolicy, stepping: OptimizerPlacement
) -> None:
    results, looked, left, _ = alone(name)
    case = CASES[name]
    expert_state = case.expert_state()
    apply_plan_synchronously(
        expert_state, a_plan(expert_state.module, WeightPlacement.STREAMED, fate, ahead=1, stepping=stepping)
    )
    for number, wanted in enumerate(results):
        assert window(expert_state, case.step_options(), number) == wanted
    assert torch.equal(held_out_losses(expert_state, [batch([50, 51])], case.step_options()), looked)
    assert_same(outcome(expert_state), left)
