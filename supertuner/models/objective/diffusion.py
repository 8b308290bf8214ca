"""What a denoiser learns: noise levels and their law, the noisy input, the target. Pure.

    Lipman et al. 2023    Flow Matching for Generative Modeling, arXiv 2210.02747
    Esser et al. 2024     Scaling Rectified Flow Transformers (SD3), arXiv 2403.03206
    Ho et al. 2020        Denoising Diffusion Probabilistic Models (DDPM), arXiv 2006.11239
    Salimans & Ho 2022    Progressive Distillation (v-prediction), arXiv 2202.00512

A level is a number from 0 (clean) to 1 (noise). Noise and level of a sample are functions of the run's seed and of the
sample's position, so that they are the same in every process, in every batch and after every resume.
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

from supertuner.core.errors import ModelError
from supertuner.models.spec import PredictionType

LossWeighting: TypeAlias = Literal["none", "sigma_sqrt", "cosmap", "min_snr", "debiased"]

MIN_SIGMA = 2.0**-20
"""No level is below this: the level 0 has nothing to learn from."""
FLUX_TOKENS = (256, 4096)
FLUX_MU = (0.5, 1.15)
"""Flux's published schedule: mu grows in a line from 0.5 at 256 tokens to 1.15 at 4096 (`scheduler_config.json`)."""
_STANDARD = NormalDist()


@dataclass(frozen=True, slots=True)
class TimestepDistribution:
    """How noise levels are drawn, before they are cut to an expert's range."""

    kind: Literal["uniform", "logit_normal"] = "uniform"
    mean: float = 0.0
    std: float = 1.0
    """logit_normal: of the normal distribution whose logistic is the level (Esser et al., eq. 19)."""
    shift: float = 1.0
    """Levels are moved towards noise by s·t / (1 + (s - 1)·t) (Esser et al., eq. 23)."""


@dataclass(frozen=True, eq=False, slots=True)
class TrainingObjective:
    """What the model predicts, on which schedule, and what a sample counts."""

    prediction: PredictionType = "flow"
    alphas_cumprod: torch.Tensor | None = None
    """The schedule of a model that predicts epsilon or v: DDPM's ᾱ_t for t = 0 … T-1. Flow needs none."""
    weighting: LossWeighting = "none"
    snr_gamma: float = 5.0
    """min_snr: the signal-to-noise ratio from which on a clean sample counts no more."""
    huber_delta: float | None = None
    """The loss is pseudo-Huber, which is a square up to about this error; None: it is a square."""

    def __post_init__(self) -> None:
        assert (self.alphas_cumprod is None) == (self.prediction == "flow"), "epsilon and v have a table, flow has none"


# ── noise levels ──────────────────────────────────────────────────────────────────────────────────────────────────────


@overload
def sigma_at(uniform: float, distribution: TimestepDistribution, low: float = 0.0, high: float = 1.0) -> float: ...
@overload
def sigma_at(
    uniform: torch.Tensor, distribution: TimestepDistribution, low: float = 0.0, high: float = 1.0
) -> torch.Tensor: ...
def sigma_at(
    uniform: float | torch.Tensor, distribution: TimestepDistribution, low: float = 0.0, high: float = 1.0
) -> float | torch.Tensor:
    """The level below which a share `uniform` (0 ≤ u < 1) of the law's levels between `low` and `high` lies.

    Computed in double precision and rounded to what fp32 can hold without leaving [low, high): a level just below an
    expert's border would otherwise become the border in the batch, and belong to the other expert.
    """
    if isinstance(uniform, torch.Tensor):
        # One at a time: vector instructions round differently from the scalar ones at the end of a batch.
        levels = [sigma_at(u, distribution, low, high) for u in uniform.double().flatten().tolist()]
        return torch.tensor(levels, dtype=torch.float32).reshape(uniform.shape)
    assert 0 <= uniform <= 1 and 0 <= low < high <= 1, (uniform, low, high)
    level = (
        _uniform_sigma(uniform, distribution, low, high)
        if distribution.kind == "uniform"
        else _logit_normal_sigma(uniform, distribution, low, high)
    )
    return _clamp_to_range(level, low, high)


def auto_shift(tokens: int) -> float:
    """The shift for a sample of so many tokens: exp(mu), with Flux's line for mu; above its 4096 tokens, eq. 23 of
    Esser et al. goes on from there: the shift grows with the square root of the tokens.

    Flux's line is not followed further up: at the 75,600 tokens of a 720p video it would say half a million.
    """
    (few, many), (low, high) = FLUX_TOKENS, FLUX_MU
    mu = low + (high - low) * (min(tokens, many) - few) / (many - few)
    return math.exp(mu) * math.sqrt(max(1.0, tokens / many))


def shift_sigma(sigma: float, shift: float) -> float:
    """Esser et al., eq. 23, with s for the square root of m/n; its inverse is the same with 1/s."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def _uniform_sigma(u: float, distribution: TimestepDistribution, low: float, high: float) -> float:
    start, end = shift_sigma(low, 1 / distribution.shift), shift_sigma(high, 1 / distribution.shift)
    return shift_sigma(start + u * (end - start), distribution.shift)


def _logit_normal_sigma(u: float, distribution: TimestepDistribution, low: float, high: float) -> float:
    """Eq. 23 multiplies the odds t / (1 - t) by s and so adds ln s to the logit: the shift only moves the mean."""
    mean, upper_half, start, end, below, above = _logit_normal_bounds(distribution, low, high)
    if upper_half:
        u = 1 - u
    share = below + u * (above - below)
    z = start if share <= 0 else end if share >= 1 else _STANDARD.inv_cdf(share)
    return _logistic((-z if upper_half else z) * distribution.std + mean)


@lru_cache(maxsize=64)  # a run has few laws and ranges, and draws millions of levels
def _logit_normal_bounds(
    distribution: TimestepDistribution, low: float, high: float
) -> tuple[float, bool, float, float, float, float]:
    """The mean of the logits; whether all else is mirrored; the range in standard deviations, and the shares of the
    law below its ends."""
    mean = distribution.mean + math.log(distribution.shift)
    start, end = (_logit(low) - mean) / distribution.std, (_logit(high) - mean) / distribution.std
    upper_half = start + end > 0
    if upper_half:  # by symmetry: tails are exact near 0, and lost near 1
        start, end = -end, -start
    below, above = _normal_cdf(start), _normal_cdf(end)
    if above - below < 1e-300:
        raise ModelError(
            f"objective: logit_mean {distribution.mean:g}, logit_std {distribution.std:g} and shift {distribution.shift:g} give noise levels from "
            f"{low:g} to {high:g} no chance at all; move logit_mean towards {_logit((low + high) / 2):.2g}"
        )
    return mean, upper_half, start, end, below, above


def _clamp_to_range(sigma: float, low: float, high: float) -> float:
    lowest, highest = _float32_bounds(low, high)
    return min(max(float(np.float32(sigma)), lowest), highest)


@lru_cache(maxsize=64)
def _float32_bounds(low: float, high: float) -> tuple[float, float]:
    """The lowest and the highest fp32 number of [low, high)."""
    lowest, highest = np.float32(max(low, MIN_SIGMA)), np.float32(high)
    if float(lowest) < low:  # as doubles: numpy would compare in fp32
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


# ── chance, by position ───────────────────────────────────────────────────────────────────────────────────────────────


def sample_uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a function of seed and position only."""
    return (_position_hash(b"level", seed, position) >> 11) * 2.0**-53


def sample_noise(seed: int, position: int, shape: Sequence[int], *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Standard normal noise in fp32 on the CPU, a function of seed, position and shape only; in `out`, where given."""
    generator = torch.Generator().manual_seed(noise_seed(seed, position))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, out=out)


def noise_seed(seed: int, position: int) -> int:
    """Seed of a position's noise: 32 bits, no two of 2**32 neighbouring positions alike.

    torch's CPU generator looks at 32 bits of its seed only. A hash of that width repeats itself within a hundred
    thousand positions; a bijection (the finalizer of MurmurHash3) of the position does not.
    """
    mixed = (position ^ _position_hash(b"noise", seed, position >> 32)) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)


def _position_hash(purpose: bytes, seed: int, position: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<8sqq", purpose, seed, position))


# ── input and target ──────────────────────────────────────────────────────────────────────────────────────────────────


def add_noise(
    clean: torch.Tensor, noise: torch.Tensor, sigmas: torch.Tensor, objective: TrainingObjective
) -> torch.Tensor:
    """x_l = α·x + σ·ε. Flow: α = 1 - l, σ = l (Esser et al., eq. 13). Else α² = ᾱ_t = 1 - σ² (Ho et al., eq. 4)."""
    signal_scale, noise_scale = _coefficients(clean, sigmas, objective)
    return signal_scale * clean + noise_scale * noise


def prediction_target(
    clean: torch.Tensor, noise: torch.Tensor, sigmas: torch.Tensor, objective: TrainingObjective
) -> torch.Tensor:
    """What the model should say of x_l.

    flow     ε - x, the velocity of the straight path (Lipman et al., eq. 23 with σ_min = 0 and time turned round)
    epsilon  ε (Ho et al., eq. 14)
    v        α·ε - σ·x (Salimans & Ho, section 4)
    """
    if objective.prediction == "flow":
        return noise - clean
    if objective.prediction == "epsilon":
        return noise
    signal_scale, noise_scale = _coefficients(clean, sigmas, objective)
    return signal_scale * noise - noise_scale * clean


def timestep_index(sigmas: torch.Tensor, timesteps: int) -> torch.Tensor:
    """The row of a table of `count` timesteps that a level falls in: what the model is told as its timestep."""
    return (sigmas.double() * timesteps).floor().long().clamp(0, timesteps - 1)


def _coefficients(
    like: torch.Tensor, sigmas: torch.Tensor, objective: TrainingObjective
) -> tuple[torch.Tensor, torch.Tensor]:
    """α and σ of each sample in fp32, shaped so that they multiply a batch."""
    shape = (-1, *(1 for _ in like.shape[1:]))
    if objective.alphas_cumprod is None:
        noise_scale = sigmas.float()
        signal_scale = 1 - noise_scale
    else:
        table = objective.alphas_cumprod.to(sigmas.device, torch.float32)
        alpha_bar = table[timestep_index(sigmas, len(table))]
        signal_scale, noise_scale = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
    return signal_scale.reshape(shape), noise_scale.reshape(shape)
