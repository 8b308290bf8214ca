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

from supertuner.plan.placement.plan import Fate, Residence, Stepping
from supertuner.step.window import WindowResult, held_out_loss
from tests.train.offload.making import Case, a_plan, acted, batch, block_names, outcome, plans, same, window

WINDOWS = 3
CASES = {
    "lora": Case(),
    "lora in bf16": Case(precision="bf16"),
    "lokr": Case(kind="lokr"),
    "loha": Case(kind="loha", precision="bf16"),
    "full": Case(kind="full"),
    "full in bf16": Case(kind="full", precision="bf16"),
    "8 bits": Case(base="int8", precision="bf16"),
    "differences": Case(kind="diff"),
    "flux": Case(model="flux"),
    "flux, full": Case(model="flux", kind="full", precision="bf16"),
    "unet": Case(model="unet"),
    "unet, full": Case(model="unet", kind="full"),
    "fp16": Case(precision="fp16"),
    "automagic": Case(optimizer="automagic"),
    "automagic, full": Case(kind="full", optimizer="automagic"),
    "prodigy": Case(kind="full", optimizer="prodigy"),
    "schedule-free": Case(kind="full", optimizer="schedule_free", ema=False),
    "adafactor": Case(kind="full", optimizer="adafactor"),
    "8-bit state": Case(kind="full", optimizer="adamw8bit"),
}


@cache
def alone(name: str) -> tuple[list[WindowResult], torch.Tensor, dict[str, Any], int]:
    """The run without a plan."""
    case = CASES[name]
    trainee = case.trainee()
    results = [window(trainee, case.rules(), number) for number in range(WINDOWS)]
    looked = held_out_loss(trainee, [batch([50, 51])], case.rules())
    return results, looked, outcome(trainee), len(block_names(trainee.module))


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_any_plan_gives_the_same_bits(name: str, data: st.DataObject) -> None:
    results, looked, left, blocks = alone(name)
    case = CASES[name]
    trainee = case.trainee()
    acting = acted(trainee, a_plan(trainee.module, **data.draw(plans(blocks))))
    for number, wanted in enumerate(results):
        assert window(trainee, case.rules(), number) == wanted
    assert torch.equal(held_out_loss(trainee, [batch([50, 51])], case.rules()), looked)
    same(outcome(trainee), left)
    acting.remove()
    same(outcome(trainee), left)


@pytest.mark.parametrize("stepping", Stepping)
@pytest.mark.parametrize(
    ("name", "fate"),
    [
        ("lora", Fate.SEND),
        ("full in bf16", Fate.KEEP),
        ("full in bf16", Fate.SEND),
        ("full in bf16", Fate.RECOMPUTE),
        ("8 bits", Fate.KEEP),
        ("unet", Fate.RECOMPUTE),
    ],
)
def test_everything_away_gives_the_same_bits(name: str, fate: Fate, stepping: Stepping) -> None:
    results, looked, left, _ = alone(name)
    case = CASES[name]
    trainee = case.trainee()
    acted(trainee, a_plan(trainee.module, Residence.STREAMED, fate, ahead=1, stepping=stepping))
    for number, wanted in enumerate(results):
        assert window(trainee, case.rules(), number) == wanted
    assert torch.equal(held_out_loss(trainee, [batch([50, 51])], case.rules()), looked)
    same(outcome(trainee), left)
