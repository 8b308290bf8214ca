"""The signal-to-noise ratio (SNR) of a sigma under any scheduler of diffusers, or the reason why it has none. Pure.

A noisy sample is α·x + σ·ε, and its SNR is α² / σ² (Kingma et al. 2021, Variational Diffusion Models, arXiv 2107.00630,
section 3). A sigma argument here is a noise level from 0 (clean) to 1 (noise), not the σ above. The result depends on
the scheduler's configuration and training table, never on what `set_timesteps` changed for sampling. For an unknown
scheduler the result is a reason; no attribute that a scheduler may lack is read.
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
"""(the scheduler's configuration, sigmas in double precision) → SNRs."""


@dataclass(frozen=True, slots=True)
class NoSnr:
    """The scheduler has no signal-to-noise ratio."""

    reason: str


def scheduler_snr(scheduler: object, sigmas: torch.Tensor) -> torch.Tensor | NoSnr:
    """The SNR of each sigma in fp32: infinite without noise, 0 for pure noise."""
    config = scheduler_config(scheduler)
    names = [kind.__name__ for kind in type(scheduler).__mro__]  # a subclass is treated like its base class
    reason = next((SCHEDULERS_WITHOUT_SNR[name] for name in names if name in SCHEDULERS_WITHOUT_SNR), None)
    if reason is not None:
        return NoSnr(f"{names[0]}: {reason}")
    formula = next((SNR_FORMULAS[name] for name in names if name in SNR_FORMULAS), None)
    if config.get("use_flow_sigmas") or config.get("prediction_type") == "flow_prediction":
        formula = flow_snr  # in this mode the scheduler does not use its table of alphas_cumprod
    if formula is not None:
        return formula(config, sigmas.double()).float()
    table = scheduler_alphas_cumprod(scheduler)
    if table is None:
        return NoSnr(f"{names[0]}: it has no table of alphas_cumprod and is not a known scheduler")
    return snr_from_alphas_cumprod(table, sigmas)


def scheduler_alphas_cumprod(scheduler: object) -> torch.Tensor | None:
    """The training table ᾱ_t of a scheduler; None if it has none."""
    table = getattr(scheduler, "alphas_cumprod", None)
    if table is None and isinstance(root := getattr(scheduler, "sqrt_alphas_cumprod", None), torch.Tensor):
        table = root.square()
    return table if isinstance(table, torch.Tensor) and table.ndim == 1 and len(table) else None


def scheduler_config(scheduler: object) -> SchedulerConfig:
    config = getattr(scheduler, "config", None)
    return config if isinstance(config, Mapping) else {}


def snr_from_alphas_cumprod(alphas_cumprod: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """ᾱ / (1 - ᾱ) at the timestep that each sigma falls in (Ho et al. 2020, arXiv 2006.11239, eq. 4)."""
    alpha_bar = alphas_cumprod.to(sigmas.device, torch.float64)[timestep_index(sigmas, len(alphas_cumprod))]
    return (alpha_bar / (1 - alpha_bar)).float()


def flow_snr(config: SchedulerConfig, sigmas: torch.Tensor) -> torch.Tensor:
    """The straight path of flow matching: α = 1 - l, σ = l (Esser et al. 2024, arXiv 2403.03206, eq. 13).

    A shift changes which sigmas occur, but not the SNR of a sigma.
    """
    return ((1 - sigmas) / sigmas).square()


def _trigflow_snr(config: SchedulerConfig, sigmas: torch.Tensor) -> torch.Tensor:
    """α = cos(l·π/2), σ = sin(l·π/2) (TrigFlow: Lu & Song 2024, arXiv 2410.11081; IPNDM's timesteps are the same)."""
    return torch.tan(sigmas * (math.pi / 2)).square().reciprocal()


def _cosine_snr(config: SchedulerConfig, sigmas: torch.Tensor) -> torch.Tensor:
    """Würstchen's continuous cosine schedule (Nichol & Dhariwal 2021, arXiv 2102.09672, eq. 17), clamped as it does."""
    scaler, s = _number(config, "scaler", 1.0), _number(config, "s", 0.008)
    scaled = 1 - (1 - sigmas) ** scaler if scaler > 1 else sigmas**scaler
    alpha_bar_start = math.cos(s / (1 + s) * math.pi / 2) ** 2
    alpha_bar = (torch.cos((scaled + s) / (1 + s) * (math.pi / 2)).square() / alpha_bar_start).clamp(0.0001, 0.9999)
    return alpha_bar / (1 - alpha_bar)


def _vp_sde_snr(config: SchedulerConfig, sigmas: torch.Tensor) -> torch.Tensor:
    """The variance-preserving SDE with linear β (Song et al. 2021, arXiv 2011.13456, eq. 33)."""
    beta_min, beta_max = _number(config, "beta_min", 0.1), _number(config, "beta_max", 20.0)
    return torch.expm1(sigmas.square() * ((beta_max - beta_min) / 2) + sigmas * beta_min).reciprocal()


def _variance_exploding_snr(config: SchedulerConfig, sigmas: torch.Tensor) -> torch.Tensor:
    """α = 1, and σ from sigma_min to sigma_max: by Karras et al. 2022, arXiv 2206.00364, eq. 5, or geometrically."""
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


_FLOW_SCHEDULERS = (
    "FlowMapEulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler",
    "FlowMatchLCMScheduler", "HeliosDMDScheduler", "HeliosScheduler", "LTXEulerAncestralRFScheduler",
    "MiniMaxH3Scheduler", "PiflowScheduler",
    "RFD4ProteinaScheduler",  # its time t runs from noise to data: sigma is 1 - t
)  # fmt: skip
_VARIANCE_EXPLODING_SCHEDULERS = (
    "CMStochasticIterativeScheduler", "CosineDPMSolverMultistepScheduler", "EDMDPMSolverMultistepScheduler",
    "EDMEulerScheduler", "ScoreSdeVeScheduler",
)  # fmt: skip
SNR_FORMULAS: Mapping[str, SnrFormula] = {
    **dict.fromkeys(_FLOW_SCHEDULERS, flow_snr),
    **dict.fromkeys(("IPNDMScheduler", "SCMScheduler"), _trigflow_snr),
    "DDPMWuerstchenScheduler": _cosine_snr,
    "ScoreSdeVpScheduler": _vp_sde_snr,
    **dict.fromkeys(_VARIANCE_EXPLODING_SCHEDULERS, _variance_exploding_snr),
}
"""Schedulers whose SNR is a formula. All others in diffusers have a table, or are listed below."""

_DISCRETE_NOISE = "it adds noise to discrete tokens, which have no signal-to-noise ratio"
SCHEDULERS_WITHOUT_SNR: Mapping[str, str] = {
    "AmusedScheduler": _DISCRETE_NOISE,
    "BlockRefinementScheduler": _DISCRETE_NOISE,
    "DiscreteDDIMScheduler": _DISCRETE_NOISE,
    "EntropyBoundScheduler": _DISCRETE_NOISE,
    "VQDiffusionScheduler": _DISCRETE_NOISE,
    "KarrasVeScheduler": "its noise levels depend on the number of sampling steps; it has none for training",
}
