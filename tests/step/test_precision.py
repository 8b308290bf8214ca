"""Number formats, and the loss scaler of fp16 with its state in a checkpoint."""

from __future__ import annotations

import json

import pytest
import torch

from supertuner.core.errors import CheckpointError
from supertuner.step.precision import ComputePrecision, LossScaler, PrecisionName

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_autocast_computes_matrix_products_in_the_chosen_format(name: PrecisionName, dtype: torch.dtype) -> None:
    precision = ComputePrecision(name, CPU)
    layer = torch.nn.Linear(4, 4)
    with precision.autocast():
        assert layer(torch.ones(2, 4)).dtype == dtype
    assert layer(torch.ones(2, 4)).dtype == torch.float32
    assert precision.dtype == dtype
    assert (precision.scaler() is not None) == (name == "fp16")


def test_the_scale_halves_on_overflow_and_doubles_after_a_long_streak() -> None:
    scaler = LossScaler()
    scaler.update(overflowed=True)
    assert (scaler.scale, scaler.streak) == (32768.0, 0)
    for _ in range(LossScaler.GROWTH_INTERVAL - 1):
        scaler.update(overflowed=False)
    assert (scaler.scale, scaler.streak) == (32768.0, 1999)
    scaler.update(overflowed=False)
    assert (scaler.scale, scaler.streak) == (65536.0, 0)


def test_the_scale_stays_within_its_bounds() -> None:
    scaler = LossScaler()
    for _ in range(40):
        scaler.update(overflowed=True)
    assert scaler.scale == 1.0 and not scaler.can_decrease
    for _ in range(30 * LossScaler.GROWTH_INTERVAL):
        scaler.update(overflowed=False)
    assert scaler.scale == 2.0**24


def test_a_scaler_continues_from_its_saved_state() -> None:
    scaler, other = LossScaler(), LossScaler()
    scaler.update(overflowed=True)
    for _ in range(1500):
        scaler.update(overflowed=False)
    other.load(json.loads(json.dumps(scaler.state())))
    for _ in range(600):
        scaler.update(overflowed=False)
        other.update(overflowed=False)
    assert other.state() == scaler.state() == {"scale": 65536.0, "streak": 100}


@pytest.mark.parametrize("state", [{}, {"scale": 2.0}, {"scale": -1.0, "streak": 0}, {"scale": "1", "streak": 0}])
def test_an_invalid_state_raises_an_error(state: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="loss scaler"):
        LossScaler().load(state)  # type: ignore[arg-type]
