"""Noise levels: the law's own distribution, cut to an expert's range, as a function of one uniform number."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from supertuner.core.errors import ModelError
from supertuner.models.objective.diffusion import MIN_SIGMA, TimestepDistribution, auto_shift, shift_sigma, sigma_at

SHARES = st.floats(0, 1, exclude_max=True)


@st.composite
def laws(draw: st.DrawFn) -> TimestepDistribution:
    shift = draw(st.floats(0.2, 15))
    if draw(st.booleans()):
        return TimestepDistribution("uniform", shift=shift)
    return TimestepDistribution("logit_normal", draw(st.floats(-2, 2)), draw(st.floats(0.3, 2)), shift)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[float, float]:
    low, high = sorted(round(draw(st.floats(0, 1)), 9) for _ in range(2))
    assume(high - low > 1e-3)
    return low, high


def cdf(law: TimestepDistribution, level: float) -> float:
    """The share of levels at or below `level`, from the definitions: undo the shift, then the law's own CDF."""
    if level in (0, 1):
        return level
    t = level / (law.shift - (law.shift - 1) * level)
    if law.kind == "uniform":
        return t
    return NormalDist(law.mean, law.std).cdf(math.log(t / (1 - t)))


@given(laws(), SHARES)
def test_the_share_of_levels_below_the_one_given_is_the_share_asked_for(law: TimestepDistribution, u: float) -> None:
    level = sigma_at(u, law)
    slope = (cdf(law, min(level * 1.001 + 1e-6, 1)) - cdf(law, level * 0.999)) / (0.002 * level + 1e-6)
    assert cdf(law, level) == pytest.approx(u, abs=1e-6 + slope * 1e-6)


@given(laws(), ranges(), st.floats(1e-6, 1 - 1e-6))  # beyond, the sum below loses the digits that tell levels apart
def test_a_cut_law_is_the_law_on_condition_of_the_range(
    law: TimestepDistribution, span: tuple[float, float], u: float
) -> None:
    low, high = span
    below, inside = cdf(law, low), cdf(law, high) - cdf(law, low)
    assume(inside > 1e-3)
    assert sigma_at(u, law, low, high) == pytest.approx(sigma_at(below + u * inside, law), abs=2e-6)


@given(laws(), ranges(), SHARES, SHARES)
def test_levels_grow_with_the_number_drawn(
    law: TimestepDistribution, span: tuple[float, float], first: float, second: float
) -> None:
    first, second = sorted((first, second))
    assert sigma_at(first, law, *span) <= sigma_at(second, law, *span)


@given(laws(), ranges(), st.sampled_from([0.0, 1e-300, 0.5, 1 - 2**-53]) | SHARES)
def test_a_level_stays_in_its_experts_range_also_in_fp32(
    law: TimestepDistribution, span: tuple[float, float], u: float
) -> None:
    low, high = span
    in_batch = torch.tensor([sigma_at(u, law, low, high)], dtype=torch.float32).double().item()
    assert max(low, MIN_SIGMA * 0.999) <= in_batch < high


@pytest.mark.parametrize(
    "law",
    [
        TimestepDistribution(),
        TimestepDistribution("logit_normal"),
        TimestepDistribution("logit_normal", 1.0, 0.5, 3.0),
        TimestepDistribution(shift=5.0),
    ],
)
def test_the_border_between_two_experts_belongs_to_the_high_noise_one(law: TimestepDistribution) -> None:
    last = 1 - 2**-53
    assert sigma_at(last, law, 0, 0.875) < 0.875 <= sigma_at(0.0, law, 0.875, 1) < sigma_at(last, law, 0.875, 1) < 1


def test_a_uniform_law_is_the_identity_and_its_shift_is_equation_23() -> None:
    assert sigma_at(0.25, TimestepDistribution()) == 0.25
    assert sigma_at(0.5, TimestepDistribution(), 0.875, 1) == 0.9375
    assert sigma_at(0.5, TimestepDistribution(shift=3.0)) == 0.75  # 3·½ / (1 + 2·½)
    assert shift_sigma(shift_sigma(0.3, 5.0), 1 / 5.0) == pytest.approx(0.3, abs=1e-15)


def test_quantiles_of_logistic_normal_numbers_are_those_of_the_law() -> None:
    """The definition of the logit-normal law: the logistic of normal numbers, here drawn and sorted."""
    chance, law = random.Random(5), TimestepDistribution("logit_normal", 0.4, 0.8, 2.0)
    drawn = sorted(shift_sigma(1 / (1 + math.exp(-chance.gauss(0.4, 0.8))), 2.0) for _ in range(100_000))
    for share in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99):
        assert drawn[int(share * len(drawn))] == pytest.approx(sigma_at(share, law), abs=6e-3)


def test_a_range_far_in_the_tail_of_the_law_keeps_its_shape() -> None:
    """Twenty deviations out, cumulative shares differ from 1 by less than a double holds; the tail is still exact."""
    law = TimestepDistribution("logit_normal", -10.0, 0.5)
    levels = [sigma_at(u, law, 0.5, 1) for u in (0.0, 0.5, 0.9)]
    assert 0.5 <= levels[0] < levels[1] < levels[2] < 0.53
    # Beyond z the normal tail falls like exp(-z·x): half of it lies within ln 2 / z.
    assert levels[1] - 0.5 == pytest.approx(0.25 * 0.5 * math.log(2) / 20, rel=0.02)


def test_a_law_that_never_reaches_the_experts_range_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ModelError, match=r"levels from 0\.875 to 1 no chance at all; move logit_mean towards 2\.7"):
        sigma_at(0.5, TimestepDistribution("logit_normal", -50.0, 0.5), 0.875, 1)


def test_a_tensor_of_numbers_gives_each_the_level_it_has_alone() -> None:
    law, numbers = (
        TimestepDistribution("logit_normal", shift=3.0),
        torch.rand(2, 9, generator=torch.Generator().manual_seed(1)),
    )
    levels = sigma_at(numbers, law, 0.0, 0.9)
    assert levels.dtype == torch.float32 and levels.shape == numbers.shape
    alone = [sigma_at(u, law, 0.0, 0.9) for u in numbers.double().flatten().tolist()]
    assert levels.flatten().tolist() == alone


def test_the_automatic_shift_is_fluxs_and_goes_on_as_a_square_root() -> None:
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    for tokens in (256, 1000, 4096):
        assert auto_shift(tokens) == pytest.approx(math.exp(calculate_shift(tokens)), rel=1e-12)
    assert auto_shift(4 * 4096) == pytest.approx(2 * auto_shift(4096), rel=1e-12)
    assert auto_shift(75_600) == pytest.approx(13.57, abs=0.01)


def test_our_shift_is_the_schedulers_shift() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0)
    ours = [shift_sigma((i + 1) / 1000, 3.0) for i in reversed(range(1000))]
    assert scheduler.sigmas[:1000].tolist() == pytest.approx(ours, abs=1e-6)
