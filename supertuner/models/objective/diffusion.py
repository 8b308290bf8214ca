"""The diffusion mathematics of training: distributions of sigmas, noisy inputs and targets. Pure.

    Lipman et al. 2023    Flow Matching for Generative Modeling, arXiv 2210.02747
    Esser et al. 2024     Scaling Rectified Flow Transformers (SD3), arXiv 2403.03206
    Ho et al. 2020        Denoising Diffusion Probabilistic Models (DDPM), arXiv 2006.11239
    Salimans & Ho 2022    Progressive Distillation (v-prediction), arXiv 2202.00512

A sigma, or noise level, is a number from 0 (clean) to 1 (pure noise). Noise and sigma of a sample are functions of the
run's seed and of the sample's position, so they are the same in every process, in every batch and after every resume.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Literal, TypeAlias, overload

import numpy as np
import torch
import xxhash
from torch import Tensor

from supertuner.core.errors import ModelError
from supertuner.models.spec import PredictionType

LossWeighting: TypeAlias = Literal["none", "sigma_sqrt", "cosmap", "min_snr", "debiased"]

MIN_SIGMA = 2.0**-20
"""The smallest sigma that is drawn: at 0 there is no noise to predict."""
FLUX_TOKENS = (256, 4096)
FLUX_MU = (0.5, 1.15)
"""Flux's published schedule: mu grows linearly from 0.5 at 256 tokens to 1.15 at 4096 (`scheduler_config.json`)."""
_STANDARD = NormalDist()


@dataclass(frozen=True, slots=True)
class TimestepDistribution:
    """The distribution of sigmas, before it is restricted to an expert's range."""

    kind: Literal["uniform", "logit_normal"] = "uniform"
    mean: float = 0.0
    std: float = 1.0
    """logit_normal: mean and standard deviation of the normal distribution whose logistic is sigma (Esser et al., eq.
    19)."""
    shift: float = 1.0
    """Moves sigmas towards 1 by s·t / (1 + (s - 1)·t) (Esser et al., eq. 23)."""


@dataclass(frozen=True, eq=False, slots=True)
class TrainingObjective:
    """What the model predicts, on which schedule, and how losses are weighted."""

    prediction: PredictionType = "flow"
    alphas_cumprod: Tensor | None = None
    """ᾱ_t of DDPM for t = 0 … T-1, for models that predict epsilon or v; None for flow matching."""
    weighting: LossWeighting = "none"
    snr_gamma: float = 5.0
    """min_snr: γ, the SNR above which the weight no longer grows."""
    huber_delta: float | None = None
    """δ of the pseudo-Huber loss, which is quadratic up to about this error; None: squared error."""

    def __post_init__(self) -> None:
        assert (self.alphas_cumprod is None) == (self.prediction == "flow"), "epsilon and v need alphas_cumprod"


# ── sigmas ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@overload
def sigma_at(uniform: float, distribution: TimestepDistribution, low: float = 0.0, high: float = 1.0) -> float: ...
@overload
def sigma_at(uniform: Tensor, distribution: TimestepDistribution, low: float = 0.0, high: float = 1.0) -> Tensor: ...
def sigma_at(
    uniform: float | Tensor, distribution: TimestepDistribution, low: float = 0.0, high: float = 1.0
) -> float | Tensor:
    """The quantile of the distribution restricted to [low, high): sigma with P(drawn sigma < sigma) = `uniform`.

    Computed in double precision and rounded to an fp32 number that is still in [low, high): otherwise a sigma just
    below an expert's boundary would be rounded to the boundary in the batch, and belong to the other expert.
    """
    if isinstance(uniform, Tensor):
        # One by one: vectorized kernels round differently from the scalar code at the end of a batch.
        sigmas = [sigma_at(u, distribution, low, high) for u in uniform.double().flatten().tolist()]
        return torch.tensor(sigmas, dtype=torch.float32).reshape(uniform.shape)
    assert 0 <= uniform <= 1 and 0 <= low < high <= 1, (uniform, low, high)
    quantile = _uniform_sigma if distribution.kind == "uniform" else _logit_normal_sigma
    lowest, highest = _float32_bounds(low, high)
    return min(max(float(np.float32(quantile(uniform, distribution, low, high))), lowest), highest)


def auto_shift(tokens: int) -> float:
    """The shift for a sample of `tokens` tokens: exp(mu) with Flux's linear mu, up to 4096 tokens.

    Above that the shift grows with the square root of the number of tokens (Esser et al., eq. 23). Extrapolating Flux's
    line would give a shift of half a million at the 75,600 tokens of a 720p video.
    """
    (few, many), (low, high) = FLUX_TOKENS, FLUX_MU
    mu = low + (high - low) * (min(tokens, many) - few) / (many - few)
    return math.exp(mu) * math.sqrt(max(1.0, tokens / many))


def shift_sigma(sigma: float, shift: float) -> float:
    """Esser et al., eq. 23, with s for the square root of m/n. The inverse is the same function with 1/s."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def _uniform_sigma(u: float, distribution: TimestepDistribution, low: float, high: float) -> float:
    start, end = shift_sigma(low, 1 / distribution.shift), shift_sigma(high, 1 / distribution.shift)
    return shift_sigma(start + u * (end - start), distribution.shift)


def _logit_normal_sigma(u: float, distribution: TimestepDistribution, low: float, high: float) -> float:
    """The inverse of the cumulative distribution, restricted to [low, high).

    Eq. 23 multiplies the odds t / (1 - t) by s and so adds ln s to the logit: the shift only moves the mean.
    """
    mean, upper_half, start, end, below, above = _logit_normal_bounds(distribution, low, high)
    if upper_half:
        u = 1 - u
    share = below + u * (above - below)
    z = start if share <= 0 else end if share >= 1 else _STANDARD.inv_cdf(share)
    return _logistic((-z if upper_half else z) * distribution.std + mean)


@lru_cache(maxsize=64)  # a run has few distributions and ranges, and draws millions of sigmas
def _logit_normal_bounds(
    distribution: TimestepDistribution, low: float, high: float
) -> tuple[float, bool, float, float, float, float]:
    """Mean of the logits; whether the rest is mirrored; the range in standard deviations (start, end); and the
    cumulative probabilities below start and end."""
    mean = distribution.mean + math.log(distribution.shift)
    start, end = (_logit(low) - mean) / distribution.std, (_logit(high) - mean) / distribution.std
    upper_half = start + end > 0
    if upper_half:  # mirrored: probabilities near 0 are exact in floating point, those near 1 are not
        start, end = -end, -start
    below, above = _normal_cdf(start), _normal_cdf(end)
    if above - below < 1e-300:
        raise ModelError(
            f"objective: with logit_mean {distribution.mean:g}, logit_std {distribution.std:g} and shift "
            f"{distribution.shift:g}, sigmas from {low:g} to {high:g} have probability 0; move logit_mean towards "
            f"{_logit((low + high) / 2):.2g}"
        )
    return mean, upper_half, start, end, below, above


@lru_cache(maxsize=64)
def _float32_bounds(low: float, high: float) -> tuple[float, float]:
    """The smallest and the largest fp32 number in [low, high)."""
    lowest, highest = np.float32(max(low, MIN_SIGMA)), np.float32(high)
    if float(lowest) < low:  # compared as Python floats: numpy would compare in fp32
        lowest = np.nextafter(lowest, np.float32(2))
    if float(highest) >= high:
        highest = np.nextafter(highest, np.float32(0))
    return float(lowest), float(highest)


def _normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _logit(sigma: float) -> float:
    return -math.inf if sigma <= 0 else math.inf if sigma >= 1 else math.log(sigma / (1 - sigma))


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


# ── random numbers by position ────────────────────────────────────────────────────────────────────────────────────────


def sample_uniform(seed: int, position: int) -> float:
    """A uniform number in [0, 1) that depends only on seed and position."""
    return (_position_hash(b"level", seed, position) >> 11) * 2.0**-53


def sample_noise(seed: int, position: int, shape: Sequence[int], *, out: Tensor | None = None) -> Tensor:
    """Standard normal noise, fp32 on the CPU: a function of seed, position and shape. Written to `out` if given."""
    generator = torch.Generator().manual_seed(noise_seed(seed, position))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, out=out)


def noise_seed(seed: int, position: int) -> int:
    """The seed of a position's noise: 32 bits, different for any two of 2**32 consecutive positions.

    torch's CPU generator uses only 32 bits of its seed. A 32-bit hash would collide within a hundred thousand
    positions; a bijection of the position (the finalizer of MurmurHash3) does not.
    """
    mixed = (position ^ _position_hash(b"noise", seed, position >> 32)) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)


def _position_hash(purpose: bytes, seed: int, position: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<8sqq", purpose, seed, position))


# ── input and target ──────────────────────────────────────────────────────────────────────────────────────────────────


def add_noise(clean: Tensor, noise: Tensor, sigmas: Tensor, objective: TrainingObjective) -> Tensor:
    """α·x + σ·ε, where x is the clean sample and l its sigma.

    Flow: α = 1 - l, σ = l (Esser et al., eq. 13). Epsilon and v: α² = ᾱ_t = 1 - σ² (Ho et al., eq. 4).
    """
    signal_scale, noise_scale = _coefficients(clean, sigmas, objective)
    return signal_scale * clean + noise_scale * noise


def prediction_target(clean: Tensor, noise: Tensor, sigmas: Tensor, objective: TrainingObjective) -> Tensor:
    """What the model should predict for the noisy sample.

    flow     ε - x, the velocity of the straight path (Lipman et al., eq. 23 with σ_min = 0 and reversed time)
    epsilon  ε (Ho et al., eq. 14)
    v        α·ε - σ·x (Salimans & Ho, section 4)
    """
    if objective.prediction == "flow":
        return noise - clean
    if objective.prediction == "epsilon":
        return noise
    signal_scale, noise_scale = _coefficients(clean, sigmas, objective)
    return signal_scale * noise - noise_scale * clean


def timestep_index(sigmas: Tensor, timesteps: int) -> Tensor:
    """The timestep (row of a table of `timesteps` rows) that each sigma falls in, as the model receives it."""
    return (sigmas.double() * timesteps).floor().long().clamp(0, timesteps - 1)


def _coefficients(like: Tensor, sigmas: Tensor, objective: TrainingObjective) -> tuple[Tensor, Tensor]:
    """α and σ of each sample in fp32, shaped to broadcast over `like`."""
    shape = (-1, *(1 for _ in like.shape[1:]))
    if objective.alphas_cumprod is None:
        noise_scale = sigmas.float()
        signal_scale = 1 - noise_scale
    else:
        table = objective.alphas_cumprod.to(sigmas.device, torch.float32)
        alpha_bar = table[timestep_index(sigmas, len(table))]
        signal_scale, noise_scale = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
    return signal_scale.reshape(shape), noise_scale.reshape(shape)
