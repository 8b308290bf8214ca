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

Config: TypeAlias = Mapping[str, object]
Formula: TypeAlias = Callable[[Config, torch.Tensor], torch.Tensor]
"""(the scheduler's configuration, levels in double precision) → their ratios."""


@dataclass(frozen=True, slots=True)
class NoSnr:
    """A scheduler whose levels have no signal-to-noise ratio."""

    reason: str


def snr_of(scheduler: object, levels: torch.Tensor) -> torch.Tensor | NoSnr:
    """The ratio of each level, fp32; infinite where there is no noise, 0 where there is nothing else."""
    config = config_of(scheduler)
    names = [kind.__name__ for kind in type(scheduler).__mro__]  # a class of one's own is what it was made from
    reason = next((NO_SNR[name] for name in names if name in NO_SNR), None)
    if reason is not None:
        return NoSnr(f"{names[0]}: {reason}")
    formula = next((FORMULAS[name] for name in names if name in FORMULAS), None)
    if config.get("use_flow_sigmas") or config.get("prediction_type") == "flow_prediction":
        formula = of_flow  # such a scheduler keeps a table of alphas_cumprod beside, which nothing uses
    if formula is not None:
        return formula(config, levels.double()).float()
    table = alphas_cumprod_of(scheduler)
    if table is None:
        return NoSnr(f"{names[0]}: it has no table of alphas_cumprod, and is not one of the known schedulers")
    return of_table(table, levels)


def alphas_cumprod_of(scheduler: object) -> torch.Tensor | None:
    """The training table ᾱ_t of a scheduler that has one."""
    table = getattr(scheduler, "alphas_cumprod", None)
    if table is None and isinstance(root := getattr(scheduler, "sqrt_alphas_cumprod", None), torch.Tensor):
        table = root.square()
    return table if isinstance(table, torch.Tensor) and table.ndim == 1 and len(table) else None


def config_of(scheduler: object) -> Config:
    config = getattr(scheduler, "config", None)
    return config if isinstance(config, Mapping) else {}


def of_table(alphas_cumprod: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """ᾱ / (1 - ᾱ) at the timestep that the level falls in (Ho et al., eq. 4)."""
    kept = alphas_cumprod.to(levels.device, torch.float64)[timestep_index(levels, len(alphas_cumprod))]
    return (kept / (1 - kept)).float()


def of_flow(config: Config, levels: torch.Tensor) -> torch.Tensor:
    """The straight path: α = 1 - l, σ = l (Esser et al., eq. 13). A shift moves levels, and not the ratio of one."""
    return ((1 - levels) / levels).square()


def _of_circle(config: Config, levels: torch.Tensor) -> torch.Tensor:
    """α = cos, σ = sin of a quarter turn (TrigFlow: Lu & Song 2024, arXiv 2410.11081; IPNDM's timesteps are such)."""
    return torch.tan(levels * (math.pi / 2)).square().reciprocal()


def _of_cosine(config: Config, levels: torch.Tensor) -> torch.Tensor:
    """Würstchen's continuous cosine schedule (Nichol & Dhariwal 2021, arXiv 2102.09672, eq. 17), cut as it cuts it."""
    scaler, s = _number(config, "scaler", 1.0), _number(config, "s", 0.008)
    moved = 1 - (1 - levels) ** scaler if scaler > 1 else levels**scaler
    begin = math.cos(s / (1 + s) * math.pi / 2) ** 2
    kept = (torch.cos((moved + s) / (1 + s) * (math.pi / 2)).square() / begin).clamp(0.0001, 0.9999)
    return kept / (1 - kept)


def _of_vp_sde(config: Config, levels: torch.Tensor) -> torch.Tensor:
    """Song et al. 2021, arXiv 2011.13456, eq. 33: β grows in a line."""
    least, most = _number(config, "beta_min", 0.1), _number(config, "beta_max", 20.0)
    return torch.expm1(levels.square() * ((most - least) / 2) + levels * least).reciprocal()


def _of_sigmas(config: Config, levels: torch.Tensor) -> torch.Tensor:
    """α = 1, and σ from sigma_min to sigma_max: by Karras et al. 2022, arXiv 2206.00364, eq. 5, or in even ratios."""
    least, most = _number(config, "sigma_min", 0.002), _number(config, "sigma_max", 80.0)
    sigma: torch.Tensor
    if "rho" in config and config.get("sigma_schedule", "karras") == "karras":
        rho = _number(config, "rho", 7.0)
        sigma = (least ** (1 / rho) + levels * (most ** (1 / rho) - least ** (1 / rho))) ** rho
    else:
        sigma = least * torch.exp(levels * math.log(most / least))
    return sigma.square().reciprocal()


def _number(config: Config, name: str, unsaid: float) -> float:
    value = config.get(name, unsaid)
    return float(value) if isinstance(value, int | float) else unsaid


FORMULAS: Mapping[str, Formula] = {
    "FlowMapEulerDiscreteScheduler": of_flow,
    "FlowMatchEulerDiscreteScheduler": of_flow,
    "FlowMatchHeunDiscreteScheduler": of_flow,
    "FlowMatchLCMScheduler": of_flow,
    "HeliosDMDScheduler": of_flow,
    "HeliosScheduler": of_flow,
    "LTXEulerAncestralRFScheduler": of_flow,
    "MiniMaxH3Scheduler": of_flow,
    "PiflowScheduler": of_flow,
    "RFD4ProteinaScheduler": of_flow,  # its time runs from noise to data: a level is 1 - t
    "IPNDMScheduler": _of_circle,
    "SCMScheduler": _of_circle,
    "DDPMWuerstchenScheduler": _of_cosine,
    "ScoreSdeVpScheduler": _of_vp_sde,
    "CMStochasticIterativeScheduler": _of_sigmas,
    "CosineDPMSolverMultistepScheduler": _of_sigmas,
    "EDMDPMSolverMultistepScheduler": _of_sigmas,
    "EDMEulerScheduler": _of_sigmas,
    "ScoreSdeVeScheduler": _of_sigmas,
}
"""Schedulers whose ratio is a formula. All others of diffusers have a table, or are below."""

_TOKENS = "its noise is in tokens, not in numbers: a noisy sample has no signal-to-noise ratio"
NO_SNR: Mapping[str, str] = {
    "AmusedScheduler": _TOKENS,
    "BlockRefinementScheduler": _TOKENS,
    "DiscreteDDIMScheduler": _TOKENS,
    "EntropyBoundScheduler": _TOKENS,
    "VQDiffusionScheduler": _TOKENS,
    "KarrasVeScheduler": "its noise is that of a number of sampling steps; it has no levels of training",
}
