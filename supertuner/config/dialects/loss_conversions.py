"""How foreign words about losses and their weights become settings of ours. Pure, as conversions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from supertuner.config.dialects.conversions import (
    ConversionNote,
    ConversionOutcome,
    InvalidValue,
    SettingValue,
    sibling_value,
)
from supertuner.config.settings.values import format_value
from supertuner.core.types import JSON

UNCAPPED_WEIGHT_NOTE = (
    "there it has no cap: samples of little noise count γ / SNR, and all others more; here none counts more than 1"
)


def min_snr_gamma(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `snr_gamma` and ai-toolkit's `min_snr_gamma`: nothing and 0 mean that it is not wanted."""
    if value in (None, 0, "", "0"):
        return []
    return [SettingValue("objective.weighting", "min_snr", is_implied=True), SettingValue("objective.snr_gamma", value)]


def ai_toolkit_snr_gamma(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """ai-toolkit's `snr_gamma`, which is not the published weight."""
    outcomes = min_snr_gamma(value, block)
    return [*outcomes, ConversionNote(f"is read as min_snr_gamma; {UNCAPPED_WEIGHT_NOTE}")] if outcomes else []


def simpletuner_loss(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `loss_type`."""
    if value == "smooth_l1":
        return [
            SettingValue("objective.loss", "huber"),
            ConversionNote("is huber here, which is smooth_l1 times huber_delta"),
        ]
    if value in ("l2", "huber"):
        return [SettingValue("objective.loss", "mse" if value == "l2" else "huber")]
    return [InvalidValue(f'{format_value(value)} is not available; allowed: "l2", "huber", "smooth_l1"')]


def huber_delta(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `huber_c`, which is given whether or not it is used."""
    if sibling_value(block, "loss_type") in ("huber", "smooth_l1"):
        return [SettingValue("objective.huber_delta", value)]
    return [ConversionNote("has no effect: loss_type is not huber")]


def huber_schedule(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `huber_schedule`."""
    if value == "constant" or sibling_value(block, "loss_type") not in ("huber", "smooth_l1"):
        return []
    return [ConversionNote("has no effect: objective.huber_delta is the same at every noise level")]


def ai_toolkit_loss(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """ai-toolkit's `train.loss_type`."""
    if value == "mse":
        return [SettingValue("objective.loss", "mse")]
    return [ConversionNote(f"{format_value(value)} is not available; objective.loss is used")]
