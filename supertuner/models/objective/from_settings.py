"""The training objective and the timestep distribution of a run, from its settings and its model. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from supertuner.config.settings.model import DEFAULT_GUIDANCE, ObjectiveSettings
from supertuner.core.events import DecisionEvent
from supertuner.models.objective.diffusion import TimestepDistribution, TrainingObjective, auto_shift
from supertuner.models.spec import Family, ModelDescription, PredictionType

FLOW_SNR_REASON = (
    "the model learns flow matching, whose velocity has the same magnitude at every noise level, so there is nothing "
    'for an SNR weight to balance; objective.flow_snr: "path" weights by the SNR of the path instead'
)


def build_objective(settings: ObjectiveSettings, family: Family, model: ModelDescription) -> TrainingObjective:
    """What this model learns, with the table of its scheduler if it has one."""
    table = None if model.alphas_cumprod is None else torch.tensor(model.alphas_cumprod, dtype=torch.float32)
    return objective_from_settings(settings, model.prediction or family.prediction, table)


def objective_from_settings(
    settings: ObjectiveSettings, prediction: PredictionType, alphas_cumprod: torch.Tensor | None = None
) -> TrainingObjective:
    """The objective of a model that predicts `prediction`, with the weighting and the loss that the settings name."""
    weighting = settings.weighting
    if prediction == "flow" and settings.flow_snr == "none" and weighting in ("min_snr", "debiased"):
        weighting = "none"
    return TrainingObjective(
        prediction,
        alphas_cumprod,
        weighting,
        snr_gamma=settings.snr_gamma,
        huber_delta=settings.huber_delta if settings.loss == "huber" else None,
    )


def weighting_decisions(settings: ObjectiveSettings, objective: TrainingObjective) -> Iterator[DecisionEvent]:
    """An event if the objective's weighting differs from the one in the settings."""
    if objective.weighting != settings.weighting:
        yield DecisionEvent("objective.weighting", objective.weighting, FLOW_SNR_REASON)


def with_training_guidance(settings: ObjectiveSettings, model: ModelDescription) -> ModelDescription:
    """The model with the guidance input that the settings name, if it has such an input."""
    return model if model.training_guidance is None else replace(model, training_guidance=settings.guidance)


def guidance_decisions(settings: ObjectiveSettings, model: ModelDescription) -> Iterator[DecisionEvent]:
    """An event if the settings name a guidance, and the model has no such input."""
    if model.training_guidance is None and settings.guidance != DEFAULT_GUIDANCE:
        reason = f"{settings.guidance:g} has no effect: guidance is not an input of this model ({model.title})"
        yield DecisionEvent("objective.guidance", None, reason)


def timestep_distribution(
    settings: ObjectiveSettings, family: Family, model: ModelDescription, shape: tuple[int, ...]
) -> TimestepDistribution:
    """The distribution that sigmas for latents of this shape (without batch) are drawn from.

    Defaults: the shift of the model's scheduler; logit-normal for flow matching, uniform for epsilon and v.
    """
    shift = auto_shift(family.token_count(model, shape)) if settings.shift == "auto" else settings.shift
    assert not isinstance(shift, str)
    flow = (model.prediction or family.prediction) == "flow"
    kind = settings.timesteps or ("logit_normal" if flow else "uniform")
    return TimestepDistribution(kind, settings.logit_mean, settings.logit_std, model.shift if shift is None else shift)
