"""The signal-to-noise ratio (SNR) of a sigma by a scheduler's training table. Pure.

A noisy sample is α·x + σ·ε, and its SNR is α² / σ² (Kingma et al. 2021, Variational Diffusion Models, arXiv 2107.00630,
section 3). A sigma argument here is a noise level from 0 (clean) to 1 (noise), not the σ above. The table belongs to
training: `set_timesteps`, which is for sampling, does not change it.
"""

from __future__ import annotations

import torch

from supertuner.models.objective.diffusion import timestep_index


def scheduler_alphas_cumprod(scheduler: object) -> torch.Tensor | None:
    """The training table ᾱ_t of a scheduler; None if it has none. No attribute that a scheduler may lack is read."""
    table = getattr(scheduler, "alphas_cumprod", None)
    if table is None and isinstance(root := getattr(scheduler, "sqrt_alphas_cumprod", None), torch.Tensor):
        table = root.square()
    return table if isinstance(table, torch.Tensor) and table.ndim == 1 and len(table) else None


def snr_from_alphas_cumprod(alphas_cumprod: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """ᾱ / (1 - ᾱ) at the timestep that each sigma falls in (Ho et al. 2020, arXiv 2006.11239, eq. 4)."""
    alpha_bar = alphas_cumprod.to(sigmas.device, torch.float64)[timestep_index(sigmas, len(alphas_cumprod))]
    return (alpha_bar / (1 - alpha_bar)).float()
