"""Loss weights by sigma, and the loss of each sample. Pure.

    Esser et al. 2024     Scaling Rectified Flow Transformers (SD3), arXiv 2403.03206
    Hang et al. 2023      Efficient Diffusion Training via Min-SNR Weighting Strategy, arXiv 2303.09556
    Yu et al. 2023        Debias the Training of Diffusion Models, arXiv 2310.08442
    Khrapov et al. 2024   Improving Diffusion Models's Data-Corruption Resistance (pseudo-Huber), arXiv 2403.16728

Weights by signal-to-noise ratio are defined for all models alike, as a weight w of the squared error in the clean
sample x. A model predicts something else, whose squared error is the error in x times a factor:

    epsilon   SNR               v   SNR + 1               flow   1 / l² = (1 + √SNR)²

So the weight of the model's own squared error is w divided by this factor. l is sigma.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from supertuner.models.objective.diffusion import TrainingObjective
from supertuner.models.objective.snr import snr_from_alphas_cumprod

MIN_SNR = 1e-4
"""`debiased` gives SNR 0 an infinite weight; smaller ratios count like this one, which limits the weight to 100."""


def loss_weight(sigmas: Tensor, objective: TrainingObjective) -> Tensor:
    """The weight of a sample's loss for each sigma l.

    cosmap      2 / (π - 2π·l + 2π·l²), the density of Esser et al., eq. 21
    sigma_sqrt  l⁻², named as in trainers of SD3; l is at least 1/1000, the first timestep of its schedule
    min_snr     w = min(SNR, γ) (Hang et al., section 3.4)
    debiased    w = √SNR (Yu et al., eq. 9: 1 / √SNR of the error in ε)
    """
    if objective.weighting == "none":
        return torch.ones_like(sigmas)
    if objective.weighting == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2))
    if objective.weighting == "sigma_sqrt":
        return sigmas.clamp(min=1e-3) ** -2
    if objective.alphas_cumprod is None:
        return _flow_weight(sigmas, objective)
    return _snr_weight(snr_from_alphas_cumprod(objective.alphas_cumprod, sigmas), objective)


def _flow_weight(sigmas: Tensor, objective: TrainingObjective) -> Tensor:
    """w · l², written without the SNR, which is infinite at l = 0. With SNR = ((1 - l) / l)²:

    debiased  √SNR · l² = (1 - l)·l            min_snr  min(SNR, γ) · l² = min((1 - l)², γ·l²)
    """
    if objective.weighting == "debiased":
        return (1 - sigmas) * sigmas
    return torch.minimum((1 - sigmas).square(), objective.snr_gamma * sigmas.square())


def _snr_weight(snr: Tensor, objective: TrainingObjective) -> Tensor:
    """w divided by the factor, written so that an SNR of 0 or infinity gives the limit of the expression.

    min_snr   epsilon: min(SNR, γ) / SNR = min(1, γ / SNR)   v: min(SNR, γ) / (SNR + 1)
    debiased  epsilon: √SNR / SNR = 1 / √SNR                 v: √SNR / (SNR + 1) = 1 / (√SNR + 1 / √SNR)
    """
    predicts_epsilon, gamma = objective.prediction == "epsilon", objective.snr_gamma
    if objective.weighting == "min_snr":
        return (gamma / snr).clamp(max=1) if predicts_epsilon else snr.clamp(max=gamma) / (snr + 1)
    return snr.clamp(min=MIN_SNR).rsqrt() if predicts_epsilon else 1 / (snr.sqrt() + snr.rsqrt())


def per_sample_loss(
    prediction: Tensor, targets: Tensor, weights: Tensor, objective: TrainingObjective, mask: Tensor | None = None
) -> Tensor:
    """The mean loss over each sample's elements times its weight: fp32, one number per sample.

    With a mask (one number from 0 to 1 per position, the same for all channels) it is the mean weighted by the mask, so
    that a small subject counts as much as a large one. A mask of zeros gives a loss of 0.
    """
    error = prediction.float() - targets.float()
    loss = error.square() if objective.huber_delta is None else pseudo_huber(error, objective.huber_delta)
    if mask is None:
        return loss.flatten(1).mean(1) * weights.float()
    mask_weights = mask.float().expand_as(loss).flatten(1)
    total = mask_weights.sum(1).clamp(min=torch.finfo(torch.float32).tiny)
    return (loss.flatten(1) * mask_weights).sum(1) / total * weights.float()


def pseudo_huber(error: Tensor, delta: float) -> Tensor:
    """2δ·(√(e² + δ²) - δ) (Khrapov et al.): e² for small errors, about 2δ·|e| for large ones.

    Computed as e² · 2δ / (√(e² + δ²) + δ): the difference would lose all digits of errors much smaller than δ.
    """
    square = error.square()
    return square * (2 * delta / ((square + delta**2).sqrt() + delta))
