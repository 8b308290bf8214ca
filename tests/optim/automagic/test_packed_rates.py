"""A rate per weight in ten bits: it goes wherever fp32 would go, and what is stored is what is documented."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from supertuner.optim.automagic.optimizer import Automagic
from supertuner.optim.automagic.packed_rates import MAX_CODE, LearningRateLimits, PackedRates
from tests.optim.automagic.plain_automagic import ReferenceAutomagic

STEPS = 3000
DEFAULTS = LearningRateLimits(start=1e-6, bump=1e-6, lowest=1e-7, highest=1e-3)
FINE = LearningRateLimits(start=1e-6, bump=1e-6, lowest=1e-7, highest=4e-3)
"""A range of 4,000 bumps, which ten bits cannot count."""


def walked(
    limits: LearningRateLimits, agree: float, steps: int = STEPS, count: int = 4096
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rates, ours and in fp32, after updates that have the sign of the last one so often."""
    weight = nn.Parameter(torch.zeros(1, count))
    ours = Automagic({"w": weight}, limits)
    plain = ReferenceAutomagic(limits.bump, limits.lowest, limits.highest, limits.start)
    chance, sign, other = torch.Generator().manual_seed(1), torch.ones(1, count), torch.zeros(1, count)
    for _ in range(steps):
        sign = torch.where(torch.rand(1, count, generator=chance) < agree, sign, -sign)
        weight.grad = sign
        ours.step()
        plain.step({"w": other}, {"w": sign})
    rates = PackedRates(limits)
    stored = {key: value.unsqueeze(0) for key, value in ours.state[weight].items()}
    return rates.read(stored, ours.scratch_for(weight))[:, :count], plain.memory["w"]["rate"]


def test_after_3000_steps_of_60_percent_agreement_the_mean_rate_is_as_expected() -> None:
    ours, plain = walked(DEFAULTS, 0.6)
    expected = DEFAULTS.start + STEPS * (0.6 - 0.4) * DEFAULTS.bump
    assert float(ours.mean()) == pytest.approx(expected, rel=0.05)
    assert torch.allclose(ours, plain, atol=1.2e-6, rtol=0), "every single one, not only their mean"


def test_in_a_range_of_more_bumps_than_ten_bits_can_count_the_mean_is_as_expected_too() -> None:
    assert PackedRates(FINE).move_probability < 0.3
    ours, plain = walked(FINE, 0.6)
    expected = FINE.start + STEPS * (0.6 - 0.4) * FINE.bump
    assert float(ours.mean()) == pytest.approx(expected, rel=0.05)
    assert float(ours.mean()) == pytest.approx(float(plain.mean()), rel=0.05)
    assert float(ours.std()) < 3 * float(plain.std())
    assert len(ours.unique()) > 50


@pytest.mark.parametrize(("agree", "share"), [(1.0, 0.999), (0.0, 0.0)])
def test_rates_reach_both_limits_and_never_pass_them(agree: float, share: float) -> None:
    ours, _ = walked(DEFAULTS, agree, steps=1100, count=64)
    low, high = DEFAULTS.lowest, DEFAULTS.highest
    assert torch.allclose(ours, torch.full_like(ours, high if share else low), rtol=1e-5)


def test_rates_without_a_tendency_spread_as_those_in_fp32_do() -> None:
    ours, plain = walked(DEFAULTS, 0.5, steps=1500)
    for quantile in (0.1, 0.5, 0.9):
        assert float(ours.quantile(quantile)) == pytest.approx(float(plain.quantile(quantile)), abs=1.2e-6)


def test_a_high_rate_of_one_weight_leaves_the_others_free() -> None:
    """One scale for a whole tensor would freeze the others: their bump would round to nothing."""
    weight = nn.Parameter(torch.zeros(1, 64))
    ours = Automagic({"w": weight}, DEFAULTS)
    for step in range(990):
        weight.grad = torch.ones(1, 64)
        weight.grad[0, 1:] = 1.0 if step % 2 else -1.0
        ours.step()
    for _ in range(100):
        weight.grad = torch.ones(1, 64)
        ours.step()
    spread = ours.learning_rate_spread()
    assert spread is not None
    assert spread.highest == pytest.approx(1e-3)
    assert spread.quantiles[1] == pytest.approx(1e-4, rel=0.05)


def test_a_weight_without_an_update_keeps_its_rate() -> None:
    weight = nn.Parameter(torch.zeros(2, 8))
    ours = Automagic({"w": weight}, DEFAULTS)
    for _ in range(50):
        weight.grad = torch.tensor([[1.0] * 8, [0.0] * 8])
        ours.step()
    spread = ours.learning_rate_spread()
    assert spread is not None
    assert (spread.lowest, spread.highest) == (pytest.approx(1.1e-6, rel=0.01), pytest.approx(50.1e-6, rel=0.01))
    assert spread.mean == pytest.approx((1.1e-6 + 50.1e-6) / 2, rel=0.01)


@pytest.mark.parametrize("count", [8, 24, 4096, 13])
def test_every_code_survives_packing(count: int) -> None:
    weight = nn.Parameter(torch.zeros(1, count))
    ours = Automagic({"w": weight}, DEFAULTS)
    weight.grad = torch.ones(1, count)
    ours.step()
    tools, state = ours.scratch_for(weight), {key: value.unsqueeze(0) for key, value in ours.state[weight].items()}
    from supertuner.optim.automagic.packed_rates import pack_codes, unpack_codes

    length = state["low"].shape[1]
    codes = torch.randint(0, MAX_CODE + 1, (1, length), dtype=torch.int16, generator=torch.Generator().manual_seed(0))
    pack_codes(codes, state, tools)
    assert torch.equal(unpack_codes(state, tools), codes)


def test_codes_lie_in_the_bytes_where_the_file_says() -> None:
    weight = nn.Parameter(torch.zeros(1, 16))
    ours = Automagic({"w": weight}, DEFAULTS)
    weight.grad = torch.ones(1, 16)
    weight.grad[0, 2 * 5 + 1] = -1.0  # the plane of bit 5, byte 1
    ours.step()
    assert ours.state[weight]["signs"].tolist() == [0, 1 << 5]
    from supertuner.optim.automagic.packed_rates import pack_codes

    codes = torch.zeros(1, 16, dtype=torch.int16)
    codes[0, 4 * 3 + 2] = 2 * 256 + 7
    state = {key: value.unsqueeze(0) for key, value in ours.state[weight].items()}
    pack_codes(codes, state, ours.scratch_for(weight))
    assert state["low"][0, 14] == 7 and state["high"].tolist() == [[0, 0, 2 << 6, 0]]


def test_a_bump_that_does_not_divide_the_range_is_rounded_so_that_it_does() -> None:
    rates = PackedRates(DEFAULTS)
    assert rates.max_code == 1000 and rates.move_probability == 1.0
    assert rates.unit == pytest.approx(DEFAULTS.bump, rel=1e-3)
    assert rates.lowest + rates.max_code * rates.unit == pytest.approx(DEFAULTS.highest)


def test_limits_that_are_one_number_are_one_rate() -> None:
    ours, _ = walked(LearningRateLimits(1e-4, 1e-6, 1e-4, 1e-4), 0.7, steps=5, count=16)
    assert torch.allclose(ours, torch.full_like(ours, 1e-4))
