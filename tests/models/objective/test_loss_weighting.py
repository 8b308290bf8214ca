"""Loss weights and losses, against closed forms of the papers and functions of diffusers.

A weight by SNR is the same weight of the error in the clean sample for all prediction types.
"""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_loss_weighting_for_sd3, compute_snr
from hypothesis import given
from hypothesis import strategies as st

from supertuner.config.settings.model import ObjectiveSettings
from supertuner.models.objective.diffusion import (
    LossWeighting,
    TrainingObjective,
    add_noise,
    prediction_target,
)
from supertuner.models.objective.from_settings import objective_from_settings, weighting_decisions
from supertuner.models.objective.loss_weighting import (
    loss_weight,
    per_sample_loss,
    pseudo_huber,
)
from supertuner.models.spec import PredictionType

TIMESTEPS = torch.arange(0, 1000, 7)
LEVELS = (TIMESTEPS + 0.5) / 1000
BY_SNR: tuple[LossWeighting, ...] = ("min_snr", "debiased")


def scheduler(zero_terminal_snr: bool = False) -> DDPMScheduler:
    return DDPMScheduler(
        1000,
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        rescale_betas_zero_snr=zero_terminal_snr,
    )


def by_table(
    prediction: PredictionType, weighting: LossWeighting, zero_terminal_snr: bool = False
) -> TrainingObjective:
    return TrainingObjective(prediction, scheduler(zero_terminal_snr).alphas_cumprod, weighting)


def test_weights_equal_those_of_diffusers_training_utilities() -> None:
    levels = torch.linspace(0.001, 1, 50)
    names: tuple[LossWeighting, ...] = ("cosmap", "sigma_sqrt", "none")
    for name in names:
        theirs = compute_loss_weighting_for_sd3(name, levels)
        torch.testing.assert_close(loss_weight(levels, TrainingObjective(weighting=name)), theirs)


def test_cosmap_is_a_density() -> None:
    """∫ 2 / (π - 2πl + 2πl²) dl over [0, 1] is 1, so the mean loss keeps its scale."""
    middles = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    assert loss_weight(middles, TrainingObjective(weighting="cosmap")).mean().item() == pytest.approx(1, abs=1e-8)


def test_no_sigma_has_an_infinite_weight() -> None:
    levels = torch.tensor([0.0, 1e-6])
    assert loss_weight(levels, TrainingObjective(weighting="sigma_sqrt")).tolist() == pytest.approx([1e6, 1e6])


def test_min_snr_follows_the_paper_for_epsilon_and_v() -> None:
    """Hang et al.: min(SNR, γ) / SNR of ε, min(SNR, γ) / (SNR + 1) of v, with diffusers' own SNR."""
    snr = compute_snr(scheduler(), TIMESTEPS)
    capped = snr.clamp(max=5)
    epsilon, v = (loss_weight(LEVELS, by_table(prediction, "min_snr")) for prediction in ("epsilon", "v"))  # type: ignore[arg-type]
    torch.testing.assert_close(epsilon, capped / snr, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(v, capped / (snr + 1), rtol=1e-4, atol=1e-6)


def test_debiased_follows_the_paper_for_epsilon() -> None:
    """Yu et al.: 1 / √SNR."""
    snr = compute_snr(scheduler(), TIMESTEPS)
    torch.testing.assert_close(loss_weight(LEVELS, by_table("epsilon", "debiased")), snr.rsqrt(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weighting", BY_SNR)
def test_an_error_in_the_clean_sample_costs_the_same_for_every_prediction_type(
    weighting: LossWeighting,
) -> None:
    """A model that mistakes the clean sample x for x + d has different errors in ε and in v."""
    clean, noise, wrong = torch.randn(3, len(LEVELS), 6, generator=torch.Generator().manual_seed(2)).double()
    costs = []
    for prediction in ("epsilon", "v"):
        objective = by_table(prediction, weighting)
        noisy = add_noise(clean, noise, LEVELS, objective)
        kept = objective.alphas_cumprod[TIMESTEPS][:, None].double()  # type: ignore[index]
        implied = (noisy - kept.sqrt() * (clean + wrong)) / (1 - kept).sqrt()
        said = prediction_target(clean + wrong, implied, LEVELS, objective)
        wanted = prediction_target(clean, noise, LEVELS, objective)
        costs.append((said - wanted).square().mean(1) * loss_weight(LEVELS, objective))
    torch.testing.assert_close(costs[0], costs[1], rtol=1e-3, atol=1e-6)


@given(st.floats(0.01, 0.99), st.floats(0.1, 50))
def test_the_snr_weights_of_flow_agree_with_those_of_the_clean_sample(level: float, gamma: float) -> None:
    """The velocity is wrong by d / l if the clean sample is wrong by d, and the SNR of the path is ((1 - l) / l)²."""
    snr, levels = ((1 - level) / level) ** 2, torch.tensor([level], dtype=torch.float64)
    found = [
        loss_weight(levels, TrainingObjective(weighting=name, snr_gamma=gamma)).item() / level**2 for name in BY_SNR
    ]
    assert found == pytest.approx([min(snr, gamma), math.sqrt(snr)])


@pytest.mark.parametrize("weighting", BY_SNR)
@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_weights_are_finite_for_pure_noise_and_without_noise(
    prediction: PredictionType, weighting: LossWeighting
) -> None:
    ends = TrainingObjective(prediction, torch.tensor([1.0, 0.5, 0.0]), weighting)
    found = loss_weight(torch.tensor([0.0, 0.5, 1.0]), ends)
    assert found.isfinite().all() and (found >= 0).all()
    assert loss_weight(LEVELS, by_table(prediction, weighting, zero_terminal_snr=True)).isfinite().all()
    assert loss_weight(torch.tensor([0.0, 1.0]), TrainingObjective(weighting=weighting)).isfinite().all()


def test_pure_noise_has_full_weight_for_epsilon_and_none_for_v() -> None:
    last, table = torch.tensor([1.0]), torch.tensor([0.5, 0.0])
    assert loss_weight(last, TrainingObjective("epsilon", table, "min_snr")).item() == 1
    assert loss_weight(last, TrainingObjective("v", table, "min_snr")).item() == 0


@pytest.mark.parametrize("weighting", BY_SNR)
def test_a_flow_model_has_equal_weights_and_reports_the_reason(weighting: LossWeighting) -> None:
    settings = ObjectiveSettings(weighting=weighting)
    objective = objective_from_settings(settings, "flow")
    assert loss_weight(LEVELS, objective).tolist() == [1.0] * len(LEVELS)
    (decided,) = weighting_decisions(settings, objective)
    assert (decided.what, decided.value) == ("objective.weighting", "none")
    assert "flow matching" in decided.reason and "objective.flow_snr" in decided.reason


def test_a_flow_model_is_weighted_by_its_path_on_request_and_reports_nothing() -> None:
    settings = ObjectiveSettings(weighting="min_snr", flow_snr="path", snr_gamma=1.0)
    objective = objective_from_settings(settings, "flow")
    assert loss_weight(torch.tensor([0.25, 0.5, 0.75]), objective).tolist() == pytest.approx([1 / 16, 1 / 4, 1 / 16])
    assert list(weighting_decisions(settings, objective)) == []


def test_a_model_with_a_table_has_the_configured_weighting() -> None:
    settings = ObjectiveSettings(weighting="min_snr", snr_gamma=3.0, loss="huber", huber_delta=0.3)
    objective = objective_from_settings(settings, "v", scheduler().alphas_cumprod)
    assert (objective.weighting, objective.snr_gamma, objective.huber_delta) == ("min_snr", 3.0, 0.3)
    assert objective_from_settings(ObjectiveSettings(huber_delta=0.3), "flow").huber_delta is None


def test_a_samples_loss_is_the_weighted_mean_square_of_its_error() -> None:
    wanted = torch.zeros(2, 3, 4)
    said = torch.stack([torch.full((3, 4), 2.0), torch.full((3, 4), 3.0)])
    assert per_sample_loss(said, wanted, torch.tensor([1.0, 0.5]), TrainingObjective()).tolist() == [4.0, 4.5]


def test_the_loss_is_computed_in_fp32_from_half_precision_predictions() -> None:
    """Squared in fp16, 300 would overflow."""
    said = torch.full((1, 2), 300.0, dtype=torch.float16)
    loss = per_sample_loss(said, torch.zeros(1, 2), torch.ones(1), TrainingObjective())
    assert loss.dtype == torch.float32 and loss.item() == 90_000


@given(st.floats(-1e3, 1e3), st.floats(0.01, 10))
def test_huber_equals_its_closed_form_and_stays_below_the_square(error: float, delta: float) -> None:
    found = pseudo_huber(torch.tensor(error, dtype=torch.float64), delta).item()
    assert found == pytest.approx(2 * delta * (math.hypot(error, delta) - delta), abs=1e-9, rel=1e-9)
    assert found <= error**2 + 1e-12 and found <= 2 * delta * abs(error) + 1e-12


def test_huber_keeps_errors_far_smaller_than_delta() -> None:
    """In fp32 √(e² + δ²) - δ is 0 for an error of δ / 10,000."""
    assert pseudo_huber(torch.tensor(1e-5), 0.1).item() == pytest.approx(1e-10, rel=1e-5)


def test_the_gradient_of_an_outlier_is_limited_by_delta() -> None:
    said = torch.tensor([[0.0, 100.0]], requires_grad=True)
    loss = per_sample_loss(said, torch.zeros(1, 2), torch.ones(1), TrainingObjective(huber_delta=0.1))
    (gradient,) = torch.autograd.grad(loss.sum(), said)
    assert gradient[0].tolist() == pytest.approx([0.0, 2 * 0.1 / 2], rel=1e-3)


def test_masked_positions_do_not_count_and_a_small_subject_weighs_as_much_as_a_large_one() -> None:
    said = torch.full((2, 3, 4, 4), 2.0, requires_grad=True)
    mask = torch.zeros(2, 1, 4, 4)
    mask[0, :, :1, :1], mask[1, :, :, :2] = 1.0, 1.0
    loss = per_sample_loss(said, torch.zeros_like(said), torch.ones(2), TrainingObjective(), mask)
    assert loss.tolist() == [4.0, 4.0]
    (gradient,) = torch.autograd.grad(loss.sum(), said)
    assert torch.equal(gradient != 0, mask.bool().expand_as(gradient))


def test_a_mask_of_ones_changes_nothing_and_a_mask_of_zeros_gives_loss_zero() -> None:
    said, wanted = torch.randn(2, 2, 3, 5, generator=torch.Generator().manual_seed(1))
    whole, shape = per_sample_loss(said, wanted, torch.ones(2), TrainingObjective()), (2, 1, 5)
    torch.testing.assert_close(
        per_sample_loss(said, wanted, torch.ones(2), TrainingObjective(), torch.ones(shape)), whole
    )
    assert per_sample_loss(said, wanted, torch.ones(2), TrainingObjective(), torch.zeros(shape)).tolist() == [0.0, 0.0]
