"""Sigmas as quantiles of their distribution, restricted to an expert's range."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling
from hypothesis import assume, given
from hypothesis import strategies as st

from supertuner.core.errors import ModelError
from supertuner.models.objective.diffusion import MIN_SIGMA, TimestepDistribution, auto_shift, shift_sigma, sigma_at

SHARES = st.floats(0, 1, exclude_max=True)


@st.composite
def distributions(draw: st.DrawFn) -> TimestepDistribution:
    shift = draw(st.floats(0.2, 15))
    if draw(st.booleans()):
        return TimestepDistribution("uniform", shift=shift)
    return TimestepDistribution("logit_normal", draw(st.floats(-2, 2)), draw(st.floats(0.3, 2)), shift)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[float, float]:
    low, high = sorted(round(draw(st.floats(0, 1)), 9) for _ in range(2))
    assume(high - low > 1e-3)
    return low, high


def cdf(distribution: TimestepDistribution, level: float) -> float:
    """The cumulative distribution function from its definition: undo the shift, then the CDF without shift."""
    if level in (0, 1):
        return level
    t = level / (distribution.shift - (distribution.shift - 1) * level)
    if distribution.kind == "uniform":
        return t
    return NormalDist(distribution.mean, distribution.std).cdf(math.log(t / (1 - t)))


@given(distributions(), SHARES)
def test_sigma_at_is_the_inverse_of_the_cumulative_distribution(distribution: TimestepDistribution, u: float) -> None:
    level = sigma_at(u, distribution)
    slope = (cdf(distribution, min(level * 1.001 + 1e-6, 1)) - cdf(distribution, level * 0.999)) / (
        0.002 * level + 1e-6
    )
    assert cdf(distribution, level) == pytest.approx(u, abs=1e-6 + slope * 1e-6)


@given(distributions(), ranges(), st.floats(1e-6, 1 - 1e-6))  # beyond that the sum below loses too many digits
def test_a_restricted_distribution_is_the_conditional_distribution(
    distribution: TimestepDistribution, span: tuple[float, float], u: float
) -> None:
    low, high = span
    below, inside = cdf(distribution, low), cdf(distribution, high) - cdf(distribution, low)
    assume(inside > 1e-3)
    assert sigma_at(u, distribution, low, high) == pytest.approx(sigma_at(below + u * inside, distribution), abs=2e-6)


@given(distributions(), ranges(), SHARES, SHARES)
def test_sigma_is_monotonic_in_the_uniform_number(
    distribution: TimestepDistribution, span: tuple[float, float], first: float, second: float
) -> None:
    first, second = sorted((first, second))
    assert sigma_at(first, distribution, *span) <= sigma_at(second, distribution, *span)


@given(distributions(), ranges(), st.sampled_from([0.0, 1e-300, 0.5, 1 - 2**-53]) | SHARES)
def test_sigma_is_in_its_experts_range_also_in_fp32(
    distribution: TimestepDistribution, span: tuple[float, float], u: float
) -> None:
    low, high = span
    in_batch = torch.tensor([sigma_at(u, distribution, low, high)], dtype=torch.float32).double().item()
    assert max(low, MIN_SIGMA * 0.999) <= in_batch < high


@pytest.mark.parametrize(
    "distribution",
    [
        TimestepDistribution(),
        TimestepDistribution("logit_normal"),
        TimestepDistribution("logit_normal", 1.0, 0.5, 3.0),
        TimestepDistribution(shift=5.0),
    ],
)
def test_the_boundary_belongs_to_the_high_noise_expert(distribution: TimestepDistribution) -> None:
    last = 1 - 2**-53
    assert (
        sigma_at(last, distribution, 0, 0.875)
        < 0.875
        <= sigma_at(0.0, distribution, 0.875, 1)
        < sigma_at(last, distribution, 0.875, 1)
        < 1
    )


def test_the_uniform_distribution_is_the_identity_and_its_shift_is_equation_23() -> None:
    assert sigma_at(0.25, TimestepDistribution()) == 0.25
    assert sigma_at(0.5, TimestepDistribution(), 0.875, 1) == 0.9375
    assert sigma_at(0.5, TimestepDistribution(shift=3.0)) == 0.75  # 3·½ / (1 + 2·½)
    assert shift_sigma(shift_sigma(0.3, 5.0), 1 / 5.0) == pytest.approx(0.3, abs=1e-15)


def test_quantiles_of_drawn_logit_normal_numbers_agree() -> None:
    """By definition of the logit-normal distribution: the logistic of normal numbers, drawn and sorted."""
    chance, distribution = random.Random(5), TimestepDistribution("logit_normal", 0.4, 0.8, 2.0)
    drawn = sorted(shift_sigma(1 / (1 + math.exp(-chance.gauss(0.4, 0.8))), 2.0) for _ in range(100_000))
    for share in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99):
        assert drawn[int(share * len(drawn))] == pytest.approx(sigma_at(share, distribution), abs=6e-3)


def test_a_range_far_in_the_tail_keeps_its_shape() -> None:
    """Twenty standard deviations out, cumulative probabilities round to 1, but the tail is still exact."""
    distribution = TimestepDistribution("logit_normal", -10.0, 0.5)
    levels = [sigma_at(u, distribution, 0.5, 1) for u in (0.0, 0.5, 0.9)]
    assert 0.5 <= levels[0] < levels[1] < levels[2] < 0.53
    # Beyond z the normal tail falls like exp(-z·x): half of it lies within ln 2 / z.
    assert levels[1] - 0.5 == pytest.approx(0.25 * 0.5 * math.log(2) / 20, rel=0.02)


def test_a_distribution_without_mass_in_the_experts_range_raises_an_error_with_a_remedy() -> None:
    with pytest.raises(ModelError, match=r"sigmas from 0\.875 to 1 have probability 0; move logit_mean towards 2\.7"):
        sigma_at(0.5, TimestepDistribution("logit_normal", -50.0, 0.5), 0.875, 1)


def test_a_tensor_gives_the_same_sigmas_as_single_numbers() -> None:
    distribution, numbers = (
        TimestepDistribution("logit_normal", shift=3.0),
        torch.rand(2, 9, generator=torch.Generator().manual_seed(1)),
    )
    levels = sigma_at(numbers, distribution, 0.0, 0.9)
    assert levels.dtype == torch.float32 and levels.shape == numbers.shape
    alone = [sigma_at(u, distribution, 0.0, 0.9) for u in numbers.double().flatten().tolist()]
    assert levels.flatten().tolist() == alone


def test_the_automatic_shift_is_that_of_flux_and_then_grows_with_the_square_root() -> None:
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    for tokens in (256, 1000, 4096):
        assert auto_shift(tokens) == pytest.approx(math.exp(calculate_shift(tokens)), rel=1e-12)
    assert auto_shift(4 * 4096) == pytest.approx(2 * auto_shift(4096), rel=1e-12)
    assert auto_shift(75_600) == pytest.approx(13.57, abs=0.01)


def test_the_shift_equals_that_of_diffusers_scheduler() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0)
    ours = [shift_sigma((i + 1) / 1000, 3.0) for i in reversed(range(1000))]
    assert scheduler.sigmas[:1000].tolist() == pytest.approx(ours, abs=1e-6)


@pytest.mark.parametrize("mean", [-1.0, 0.4])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_diffusers_scripts_draw_these_noise_levels_with_the_opposite_logit_mean(mean: float, shift: float) -> None:
    """As in train_dreambooth_lora_flux.py and _sd3.py: u indexes the timesteps, which descend from noise to clean."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    random_numbers = torch.Generator().manual_seed(5)
    u = compute_density_for_timestep_sampling("logit_normal", 200_000, mean, 0.8, generator=random_numbers)
    theirs = scheduler.sigmas[(u * scheduler.config.num_train_timesteps).long()]
    shares = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])
    ours = sigma_at(shares, TimestepDistribution("logit_normal", -mean, 0.8, shift))
    assert theirs.quantile(shares) == pytest.approx(ours, abs=0.01)
    assert theirs.quantile(shares) != pytest.approx(
        sigma_at(shares, TimestepDistribution("logit_normal", mean, 0.8, shift)), abs=0.05
    )
