"""The moving average: its formula, its warm-up, and resuming from a saved state to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from supertuner.core.errors import CheckpointError
from supertuner.optim.ema import EmaWeights
from supertuner.optim.optimizer_registry import ExpertOptimizer
from tests.optim.optimizer_builders import build_named_optimizer, build_weights, same_bits, train_steps


def test_the_average_follows_its_formula() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    ema = EmaWeights({"w": parameter}, decay=0.5)
    average = parameter.detach().clone()
    for n in range(12):
        parameter.data += 1.0
        ema.update()
        decay = min(0.5, (1 + n) / (10 + n))
        average = decay * average + (1 - decay) * parameter.detach()
        assert torch.allclose(ema.averages["w"].double(), average, atol=1e-5)
    assert ema.averages["w"].dtype == torch.float32
    assert ema.current_decay() == 0.5


def test_the_first_updates_stay_near_the_weights() -> None:
    assert EmaWeights(build_weights(), decay=0.9999).current_decay() == pytest.approx(0.1)


def test_averages_of_bf16_weights_are_stored_in_fp32() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    ema = EmaWeights({"w": parameter}, decay=0.9)
    parameter.data.fill_(2)
    ema.update()
    assert ema.averages["w"].tolist() == pytest.approx([1.9] * 3)


def test_a_saved_and_loaded_average_continues_to_the_bit(tmp_path: Path) -> None:
    def advance(ema: EmaWeights, optimizer: ExpertOptimizer, begin: int, end: int) -> None:
        for step in range(begin, end):
            train_steps(optimizer, step, step + 1)
            ema.update()

    parameters = build_weights()
    optimizer, uninterrupted = build_named_optimizer("adamw", parameters), EmaWeights(parameters, 0.99)
    advance(uninterrupted, optimizer, 0, 5)
    averages, updates = uninterrupted.state()
    save_file(averages, tmp_path / "ema.safetensors")
    second = EmaWeights(parameters, 0.99)
    second.load(load_file(tmp_path / "ema.safetensors"), updates)
    train_steps(optimizer, 5, 6)
    uninterrupted.update()
    second.update()
    assert same_bits(uninterrupted.averages, second.averages)
    assert uninterrupted.updates == second.updates == 6
    assert not same_bits(averages, uninterrupted.averages)


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_averages_that_do_not_match_raise_an_error_with_a_name(change: str) -> None:
    ema = EmaWeights(build_weights(), 0.99)
    averages, updates = EmaWeights(build_weights(), 0.99).state()
    if change == "missing":
        del averages["scale"]
    else:
        averages["scale" if change == "shape" else "stranger"] = torch.zeros(4)
    with pytest.raises(CheckpointError, match="scale" if change != "extra" else "stranger"):
        ema.load(averages, updates)
