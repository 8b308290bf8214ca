"""Conversions of dialect keys about losses and loss weights. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from supertuner.config.dialects.conversions import ConversionNote, Outcomes, SettingValue, not_available, sibling_value
from supertuner.config.settings.values import format_value
from supertuner.core.types import JSON

UNCAPPED_WEIGHT_NOTE = "ai-toolkit weights every sample by γ / SNR; here the weight is at most 1"


def min_snr_gamma(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `snr_gamma` and ai-toolkit's `min_snr_gamma`; null and 0 turn it off."""
    if value in (None, 0, "", "0"):
        return []
    return [SettingValue("objective.weighting", "min_snr", is_implied=True), SettingValue("objective.snr_gamma", value)]


def ai_toolkit_snr_gamma(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `snr_gamma`, which is not the published min-SNR weight."""
    outcomes = min_snr_gamma(value, block)
    return [*outcomes, ConversionNote(f"is read as min_snr_gamma; {UNCAPPED_WEIGHT_NOTE}")] if outcomes else []


def simpletuner_loss(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `loss_type`."""
    if value == "smooth_l1":
        note = ConversionNote('sets objective.loss: "huber", which is smooth_l1 multiplied by huber_delta')
        return [SettingValue("objective.loss", "huber"), note]
    if value in ("l2", "huber"):
        return [SettingValue("objective.loss", "mse" if value == "l2" else "huber")]
    return [not_available(value, ("l2", "huber", "smooth_l1"))]


def huber_delta(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `huber_c`; it counts only with a Huber loss."""
    if sibling_value(block, "loss_type") in ("huber", "smooth_l1"):
        return [SettingValue("objective.huber_delta", value)]
    return [ConversionNote("has no effect: loss_type is not huber")]


def huber_schedule(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `huber_schedule`."""
    if value == "constant" or sibling_value(block, "loss_type") not in ("huber", "smooth_l1"):
        return []
    return [ConversionNote("has no effect: objective.huber_delta is the same at every noise level")]


def ai_toolkit_loss(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `train.loss_type`."""
    if value == "mse":
        return [SettingValue("objective.loss", "mse")]
    return [ConversionNote(f"{format_value(value)} is not available; objective.loss is used")]
