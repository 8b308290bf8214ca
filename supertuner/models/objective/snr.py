"""The signal-to-noise ratio of a noise level under any scheduler of diffusers, or why it has none. Pure.

A noisy sample is α·x + σ·ε, and its ratio is α² / σ² (Kingma et al. 2021, Variational Diffusion Models, arXiv
2107.00630, section 3). A level is a number from 0 (clean) to 1 (noise). The answer depends on the scheduler's
configuration and on its training table, never on what `set_timesteps` made of it for sampling, and a scheduler that is
not known, or has no ratio, is answered with the reason: nothing is asked of it that it may not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from supertuner.models.objective.diffusion import timestep_index

SchedulerConfig: TypeAlias = Mapping[str, object]
SnrFormula: TypeAlias = Callable[[SchedulerConfig, torch.Tensor], torch.Tensor]
"""(the scheduler's configuration, levels in double precision) → their ratios."""


@dataclass(frozen=True, slots=True)
class NoSnr:
    """A scheduler whose levels have no signal-to-noise ratio."""

    reason: str


def scheduler_snr(scheduler: object, sigmas: torch.Tensor) -> torch.Tensor | NoSnr:
    """The ratio of each level, fp32; infinite where there is no noise, 0 where there is nothing else."""
    config = scheduler_config(scheduler)
    names = [kind.__name__ for kind in type(scheduler).__mro__]  # a class of one's own is what it was made from
    reason = next((SCHEDULERS_WITHOUT_SNR[name] for name in names if name in SCHEDULERS_WITHOUT_SNR), None)
    if reason is not None:
        return NoSnr(f"{names[0]}: {reason}")
    formula = next((SNR_FORMULAS[name] for name in names if name in SNR_FORMULAS), None)
    if config.get("use_flow_sigmas") or config.get("prediction_type") == "flow_prediction":
        formula = flow_snr  # such a scheduler keeps a table of alphas_cumprod beside, which nothing uses
    if formula is not None:
        return formula(config, sigmas.double()).float()
    table = scheduler_alphas_cumprod(scheduler)
    if table is None:
        return NoSnr(f"{names[0]}: it has no table of alphas_cumprod, and is not one of the known schedulers")
    return snr_from_alphas_cumprod(table, sigmas)


def scheduler_alphas_cumprod(scheduler: object) -> torch.Tensor | None:
    """The training table ᾱ_t of a scheduler that has one."""
    table = getattr(scheduler, "alphas_cumprod", None)
    if table is None and isinstance(root := getattr(scheduler, "sqrt_alphas_cumprod", None), torch.Tensor):
        table = root.square()
    return table if isinstance(table, torch.Tensor) and table.ndim == 1 and len(table) else None


def scheduler_config(scheduler: object) -> SchedulerConfig:
    config = getattr(scheduler, "config", None)
    return config if isinstance(config, Mapping) else {}


def snr_from_alphas_cumprod(alphas_cumprod: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """ᾱ / (1 - ᾱ) at the timestep that the level falls in (Ho et al., eq. 4)."""
    alpha_bar = alphas_cumprod.to(sigmas.device, torch.float64)[timestep_index(sigmas, len(alphas_cumprod))]
    return (alpha_bar / (1 - alpha_bar)).float()


def flow_snr(config: SchedulerConfig, sigmas: torch.Tensor) -> torch.Tensor:
    """The straight path: α = 1 - l, σ = l (Esser et al., eq. 13). A shift moves levels, and not the ratio of one."""
    return ((1 - sigmas) / sigmas).square()


def _trigflow_snr(config: SchedulerConfig, sigmas: torch.Tensor) -> torch.Tensor:
    """α = cos, σ = sin of a quarter turn (TrigFlow: Lu & Song 2024, arXiv 2410.11081; IPNDM's timesteps are such)."""
    return torch.tan(sigmas * (math.pi / 2)).square().reciprocal()


def _cosine_snr(config: SchedulerConfig, sigmas: torch.Tensor) -> torch.Tensor:
    """Würstchen's continuous cosine schedule (Nichol & Dhariwal 2021, arXiv 2102.09672, eq. 17), cut as it cuts it."""
    scaler, s = _number(config, "scaler", 1.0), _number(config, "s", 0.008)
    scaled = 1 - (1 - sigmas) ** scaler if scaler > 1 else sigmas**scaler
    alpha_bar_start = math.cos(s / (1 + s) * math.pi / 2) ** 2
    alpha_bar = (torch.cos((scaled + s) / (1 + s) * (math.pi / 2)).square() / alpha_bar_start).clamp(0.0001, 0.9999)
    return alpha_bar / (1 - alpha_bar)


def _vp_sde_snr(config: SchedulerConfig, sigmas: torch.Tensor) -> torch.Tensor:
    """Song et al. 2021, arXiv 2011.13456, eq. 33: β grows in a line."""
    beta_min, beta_max = _number(config, "beta_min", 0.1), _number(config, "beta_max", 20.0)
    return torch.expm1(sigmas.square() * ((beta_max - beta_min) / 2) + sigmas * beta_min).reciprocal()


def _variance_exploding_snr(config: SchedulerConfig, sigmas: torch.Tensor) -> torch.Tensor:
    """α = 1, and σ from sigma_min to sigma_max: by Karras et al. 2022, arXiv 2206.00364, eq. 5, or in even ratios."""
    sigma_min, sigma_max = _number(config, "sigma_min", 0.002), _number(config, "sigma_max", 80.0)
    noise_scale: torch.Tensor
    if "rho" in config and config.get("sigma_schedule", "karras") == "karras":
        rho = _number(config, "rho", 7.0)
        noise_scale = (sigma_min ** (1 / rho) + sigmas * (sigma_max ** (1 / rho) - sigma_min ** (1 / rho))) ** rho
    else:
        noise_scale = sigma_min * torch.exp(sigmas * math.log(sigma_max / sigma_min))
    return noise_scale.square().reciprocal()


def _number(config: SchedulerConfig, name: str, default: float) -> float:
    value = config.get(name, default)
    return float(value) if isinstance(value, int | float) else default


SNR_FORMULAS: Mapping[str, SnrFormula] = {
    "FlowMapEulerDiscreteScheduler": flow_snr,
    "FlowMatchEulerDiscreteScheduler": flow_snr,
    "FlowMatchHeunDiscreteScheduler": flow_snr,
    "FlowMatchLCMScheduler": flow_snr,
    "HeliosDMDScheduler": flow_snr,
    "HeliosScheduler": flow_snr,
    "LTXEulerAncestralRFScheduler": flow_snr,
    "MiniMaxH3Scheduler": flow_snr,
    "PiflowScheduler": flow_snr,
    "RFD4ProteinaScheduler": flow_snr,  # its time runs from noise to data: a level is 1 - t
    "IPNDMScheduler": _trigflow_snr,
    "SCMScheduler": _trigflow_snr,
    "DDPMWuerstchenScheduler": _cosine_snr,
    "ScoreSdeVpScheduler": _vp_sde_snr,
    "CMStochasticIterativeScheduler": _variance_exploding_snr,
    "CosineDPMSolverMultistepScheduler": _variance_exploding_snr,
    "EDMDPMSolverMultistepScheduler": _variance_exploding_snr,
    "EDMEulerScheduler": _variance_exploding_snr,
    "ScoreSdeVeScheduler": _variance_exploding_snr,
}
"""Schedulers whose ratio is a formula. All others of diffusers have a table, or are below."""

_DISCRETE_NOISE = "its noise is in tokens, not in numbers: a noisy sample has no signal-to-noise ratio"
SCHEDULERS_WITHOUT_SNR: Mapping[str, str] = {
    "AmusedScheduler": _DISCRETE_NOISE,
    "BlockRefinementScheduler": _DISCRETE_NOISE,
    "DiscreteDDIMScheduler": _DISCRETE_NOISE,
    "EntropyBoundScheduler": _DISCRETE_NOISE,
    "VQDiffusionScheduler": _DISCRETE_NOISE,
    "KarrasVeScheduler": "its noise is that of a number of sampling steps; it has no levels of training",
}
