"""Noise by position, noisy inputs and targets, against closed forms and schedulers of diffusers."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st

from supertuner.models.objective.diffusion import (
    TrainingObjective,
    add_noise,
    noise_seed,
    prediction_target,
    sample_noise,
    sample_uniform,
    timestep_index,
)
from supertuner.models.spec import PredictionType

POSITIONS = st.integers(0, 2**31)


def drawn(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ddpm(prediction: PredictionType) -> tuple[DDPMScheduler, TrainingObjective]:
    scheduler = DDPMScheduler(1000, beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    return scheduler, TrainingObjective(prediction, scheduler.alphas_cumprod)


def test_flow_noise_equals_that_of_the_scheduler_at_the_same_sigma() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(1000, shift=3.0)
    clean, noise, picked = drawn(4, 3, 2, 5, 5), drawn(4, 3, 2, 5, 5, seed=4), [0, 17, 500, 999]
    theirs = scheduler.scale_noise(clean, scheduler.timesteps[picked], noise)
    torch.testing.assert_close(add_noise(clean, noise, scheduler.sigmas[picked], TrainingObjective()), theirs)


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_variance_preserving_noise_and_velocity_equal_the_schedulers(prediction: PredictionType) -> None:
    scheduler, objective = ddpm(prediction)
    clean, noise, timesteps = drawn(4, 3, 5, 5), drawn(4, 3, 5, 5, seed=4), torch.tensor([0, 17, 500, 999])
    levels = (timesteps + 0.5) / 1000
    torch.testing.assert_close(add_noise(clean, noise, levels, objective), scheduler.add_noise(clean, noise, timesteps))
    wanted = noise if prediction == "epsilon" else scheduler.get_velocity(clean, noise, timesteps)
    torch.testing.assert_close(prediction_target(clean, noise, levels, objective), wanted)


def test_the_flow_target_leads_from_any_sigma_to_the_clean_sample_and_to_the_noise() -> None:
    clean, noise, levels = drawn(3, 8), drawn(3, 8, seed=4), torch.tensor([0.1, 0.5, 0.9])
    noisy, velocity = (
        add_noise(clean, noise, levels, TrainingObjective()),
        prediction_target(clean, noise, levels, TrainingObjective()),
    )
    torch.testing.assert_close(noisy - levels[:, None] * velocity, clean)
    torch.testing.assert_close(noisy + (1 - levels[:, None]) * velocity, noise)


def test_v_and_the_noisy_sample_determine_sample_and_noise() -> None:
    """Salimans & Ho: x = α·x_t - σ·v and ε = σ·x_t + α·v."""
    scheduler, objective = ddpm("v")
    clean, noise, levels = drawn(3, 8), drawn(3, 8, seed=4), torch.tensor([0.1005, 0.5005, 0.9005])
    noisy, v = add_noise(clean, noise, levels, objective), prediction_target(clean, noise, levels, objective)
    kept = scheduler.alphas_cumprod[[100, 500, 900]][:, None]
    torch.testing.assert_close(kept.sqrt() * noisy - (1 - kept).sqrt() * v, clean, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close((1 - kept).sqrt() * noisy + kept.sqrt() * v, noise, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("clean_dtype", [torch.bfloat16, torch.float32])
def test_noise_is_added_in_fp32_for_latents_of_any_format(clean_dtype: torch.dtype) -> None:
    clean = drawn(2, 4).to(clean_dtype)
    assert add_noise(clean, drawn(2, 4), torch.tensor([0.2, 0.7]), TrainingObjective()).dtype == torch.float32
    assert prediction_target(clean, drawn(2, 4), torch.tensor([0.2, 0.7]), TrainingObjective()).dtype == torch.float32


@given(st.integers(0, 999))
def test_the_sigma_of_a_timestep_maps_back_to_that_timestep(timestep: int) -> None:
    levels = torch.tensor([timestep / 1000 + 1e-4, (timestep + 1) / 1000 - 1e-4], dtype=torch.float32)
    assert timestep_index(levels, 1000).tolist() == [timestep, timestep]
    assert timestep_index(torch.tensor([1.0]), 1000).tolist() == [999]


def test_an_objective_without_its_table_raises_an_assertion() -> None:
    with pytest.raises(AssertionError):
        TrainingObjective("epsilon")


def test_noise_of_a_position_is_the_same_in_another_process() -> None:
    code = (
        "from supertuner.models.objective.diffusion import *; import hashlib\n"
        "n = sample_noise(7, 123456789, (4, 2, 8, 8)).numpy().tobytes()\n"
        "import sys; sys.stdout.write(hashlib.sha256(n).hexdigest() + ' ' + sample_uniform(7, 123456789).hex())"
    )
    runs = {subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)}
    here = hashlib.sha256(sample_noise(7, 123456789, (4, 2, 8, 8)).numpy().tobytes()).hexdigest()
    assert runs == {f"{here} {sample_uniform(7, 123456789).hex()}".encode()}


def test_drawing_noise_does_not_change_the_global_random_state() -> None:
    before = torch.random.get_rng_state()
    sample_noise(1, 2, (100,))
    sample_uniform(1, 2)
    assert torch.equal(before, torch.random.get_rng_state())


@given(st.integers(0, 2**40), st.integers(0, 2**40), POSITIONS, POSITIONS)
def test_noise_differs_if_seed_or_position_differ(seed: int, other: int, one: int, two: int) -> None:
    if one != two:
        assert noise_seed(seed, one) != noise_seed(seed, two)
        assert sample_uniform(seed, one) != sample_uniform(seed, two)
    if seed != other:
        assert sample_uniform(seed, one) != sample_uniform(other, one)


def test_the_uniform_numbers_of_neighbouring_positions_are_uniform_and_uncorrelated() -> None:
    numbers = torch.tensor([sample_uniform(11, position) for position in range(100_000)], dtype=torch.float64)
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = torch.histc(numbers, 100, 0, 1)
    assert ((counts - 1000) ** 2 / 1000).sum().item() < 160  # chi-square, 99 degrees of freedom: p about 1e-4
    assert abs(torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1].item()) < 4 / math.sqrt(100_000)


def test_noise_of_neighbouring_positions_is_normal_and_uncorrelated() -> None:
    rows = torch.stack([sample_noise(11, position, (256,)) for position in range(400)])
    assert rows.dtype == torch.float32
    assert rows.mean().abs() < 4 / math.sqrt(rows.numel()) and rows.std().item() == pytest.approx(1, abs=0.01)
    assert (rows[1:] * rows[:-1]).mean().abs() < 4 / math.sqrt(rows.numel())
