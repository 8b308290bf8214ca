"""Packed learning rates: they follow fp32 rates, and their layout is the documented one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from supertuner.optim.automagic.optimizer import Automagic
from supertuner.optim.automagic.packed_rates import PackedRates, pack_codes, unpack_codes
from supertuner.optim.automagic.rate_grid import MAX_CODE, LearningRateLimits
from tests.optim.automagic.reference_automagic import ReferenceAutomagic

STEPS = 3000
DEFAULTS = LearningRateLimits(start=1e-6, bump=1e-6, lowest=1e-7, highest=1e-3)
FINE = LearningRateLimits(start=1e-6, bump=1e-6, lowest=1e-7, highest=4e-3)
"""A range of 4,000 bumps, more than 10 bits can count."""


def rates_after(
    limits: LearningRateLimits, agree: float, steps: int = STEPS, count: int = 4096
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed rates and fp32 rates after updates that keep their sign with probability `agree`."""
    weight = nn.Parameter(torch.zeros(1, count))
    optimizer = Automagic({"w": weight}, limits)
    reference = ReferenceAutomagic(limits.bump, limits.lowest, limits.highest, limits.start)
    generator, sign, other = torch.Generator().manual_seed(1), torch.ones(1, count), torch.zeros(1, count)
    for _ in range(steps):
        sign = torch.where(torch.rand(1, count, generator=generator) < agree, sign, -sign)
        weight.grad = sign
        optimizer.step()
        reference.step({"w": other}, {"w": sign})
    rates = PackedRates(limits)
    stored = {key: value.unsqueeze(0) for key, value in optimizer.state[weight].items()}
    return rates.read(stored, optimizer.scratch_for(weight))[:, :count], reference.states["w"]["rate"]


def test_after_3000_steps_with_60_percent_agreement_the_mean_rate_is_as_expected() -> None:
    packed, reference = rates_after(DEFAULTS, 0.6)
    expected = DEFAULTS.start + STEPS * (0.6 - 0.4) * DEFAULTS.bump
    assert float(packed.mean()) == pytest.approx(expected, rel=0.05)
    assert torch.allclose(packed, reference, rtol=0.02), "every rate, not only the mean"


def test_in_a_range_of_more_than_1023_bumps_the_mean_rate_is_as_expected() -> None:
    assert PackedRates(FINE).grid.move_probability < 0.3
    packed, reference = rates_after(FINE, 0.6)
    expected = FINE.start + STEPS * (0.6 - 0.4) * FINE.bump
    assert float(packed.mean()) == pytest.approx(expected, rel=0.05)
    assert float(packed.mean()) == pytest.approx(float(reference.mean()), rel=0.05)
    assert float(packed.std()) < 3 * float(reference.std())
    assert len(packed.unique()) > 50


@pytest.mark.parametrize(("agree", "share"), [(1.0, 0.999), (0.0, 0.0)])
def test_rates_reach_both_limits_and_never_pass_them(agree: float, share: float) -> None:
    packed, _ = rates_after(DEFAULTS, agree, steps=1100, count=64)
    low, high = DEFAULTS.lowest, DEFAULTS.highest
    assert torch.allclose(packed, torch.full_like(packed, high if share else low), rtol=1e-5)


def test_without_a_tendency_the_rates_are_distributed_like_fp32_rates() -> None:
    packed, reference = rates_after(DEFAULTS, 0.5, steps=1500)
    for quantile in (0.1, 0.5, 0.9):
        assert float(packed.quantile(quantile)) == pytest.approx(float(reference.quantile(quantile)), abs=1.2e-6)


def test_a_high_rate_of_one_weight_does_not_stop_the_others() -> None:
    """With one scale per tensor, the bumps of the other rates would be rounded to zero."""
    weight = nn.Parameter(torch.zeros(1, 64))
    optimizer = Automagic({"w": weight}, DEFAULTS)
    for step in range(990):
        weight.grad = torch.ones(1, 64)
        weight.grad[0, 1:] = 1.0 if step % 2 else -1.0
        optimizer.step()
    for _ in range(100):
        weight.grad = torch.ones(1, 64)
        optimizer.step()
    spread = optimizer.learning_rate_spread()
    assert spread is not None
    assert spread.highest == pytest.approx(1e-3)
    assert spread.quantiles[1] == pytest.approx(1e-4, rel=0.05)


def test_a_weight_without_an_update_keeps_its_rate() -> None:
    weight = nn.Parameter(torch.zeros(2, 8))
    optimizer = Automagic({"w": weight}, DEFAULTS)
    for _ in range(50):
        weight.grad = torch.tensor([[1.0] * 8, [0.0] * 8])
        optimizer.step()
    spread = optimizer.learning_rate_spread()
    assert spread is not None
    assert (spread.lowest, spread.highest) == (pytest.approx(1e-6), pytest.approx(50e-6))
    assert spread.mean == pytest.approx((1e-6 + 50e-6) / 2)


@pytest.mark.parametrize("count", [8, 24, 4096, 13])
def test_every_code_survives_packing(count: int) -> None:
    weight = nn.Parameter(torch.zeros(1, count))
    optimizer = Automagic({"w": weight}, DEFAULTS)
    weight.grad = torch.ones(1, count)
    optimizer.step()
    scratch, state = (
        optimizer.scratch_for(weight),
        {key: value.unsqueeze(0) for key, value in optimizer.state[weight].items()},
    )
    length = state["low"].shape[1]
    codes = torch.randint(0, MAX_CODE + 1, (1, length), dtype=torch.int16, generator=torch.Generator().manual_seed(0))
    pack_codes(codes, state, scratch)
    assert torch.equal(unpack_codes(state, scratch), codes)


def test_codes_and_signs_are_in_the_documented_bytes() -> None:
    weight = nn.Parameter(torch.zeros(1, 16))
    optimizer = Automagic({"w": weight}, DEFAULTS)
    weight.grad = torch.ones(1, 16)
    weight.grad[0, 2 * 5 + 1] = -1.0  # the plane of bit 5, byte 1
    optimizer.step()
    assert optimizer.state[weight]["signs"].tolist() == [0, 1 << 5]
    codes = torch.zeros(1, 16, dtype=torch.int16)
    codes[0, 4 * 3 + 2] = 2 * 256 + 7
    state = {key: value.unsqueeze(0) for key, value in optimizer.state[weight].items()}
    pack_codes(codes, state, optimizer.scratch_for(weight))
    assert state["low"][0, 14] == 7 and state["high"].tolist() == [[0, 0, 2 << 6, 0]]


def test_equal_limits_give_one_constant_rate() -> None:
    packed, _ = rates_after(LearningRateLimits(1e-4, 1e-6, 1e-4, 1e-4), 0.7, steps=5, count=16)
    assert torch.allclose(packed, torch.full_like(packed, 1e-4))


@pytest.mark.parametrize("native", [False, True], ids=["torch", "C"])
@pytest.mark.parametrize(
    "limits",
    [
        DEFAULTS,
        LearningRateLimits(start=1e-6, bump=5e-7, lowest=1e-7, highest=5e-4),
        LearningRateLimits(start=2e-6, bump=1e-5, lowest=1e-7, highest=1e-3),
        LearningRateLimits(start=2e-6, bump=1e-6, lowest=1.5e-6, highest=4e-6),
        LearningRateLimits(start=1e-4, bump=1.7e-6, lowest=1e-7, highest=1e-3),
    ],
    ids=["defaults", "low-noise expert of the GH200 forks", "large bump", "narrow range", "high start"],
)
def test_both_kernels_move_codes_as_the_grid_says(limits: LearningRateLimits, native: bool) -> None:
    """Long rises and falls, so that codes meet both limits and pass the split; all codes and the last rates."""
    count = 64
    weight = nn.Parameter(torch.zeros(1, count))
    optimizer = Automagic({"w": weight}, limits, native=native)
    grid = PackedRates(limits).grid
    expected, signs = [grid.nearest_code(limits.start)] * count, torch.ones(count)
    random = torch.Generator().manual_seed(3)
    scratch = optimizer.scratch_for(weight)
    for step in range(1400):
        agree = torch.rand(count, generator=random) < (1.0, 0.0, 0.7, 0.2)[step // 300 % 4]
        if step:
            expected = [grid.move(code, 1 if same else -1) for code, same in zip(expected, agree.tolist(), strict=True)]
            signs = torch.where(agree, signs, -signs)
        weight.grad = signs.view(1, count).clone()
        with torch.no_grad():
            weight.zero_()
        optimizer.step()
        if step % 50 == 0 or step > 1390:
            stored = {key: value.unsqueeze(0) for key, value in optimizer.state[weight].items()}
            assert unpack_codes(stored, scratch)[0, :count].tolist() == expected, step
    rates = torch.tensor([grid.rate(code) for code in expected])
    assert torch.allclose(weight.detach().abs()[0], rates, rtol=1e-5), "updates of root mean square 1"
