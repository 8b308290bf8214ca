"""How foreign words about losses and their weights become settings of ours. Pure, as conversions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from supertuner.config.dialects.conversions import No, Outcome, Put, Said, beside
from supertuner.config.sources.values import shown
from supertuner.core.types import JSON

NO_CAP = "there it has no cap: samples of little noise count γ / SNR, and all others more; here none counts more than 1"


def min_snr(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's `snr_gamma` and ai-toolkit's `min_snr_gamma`: nothing and 0 mean that it is not wanted."""
    if value in (None, 0, "", "0"):
        return []
    return [Put("objective.weighting", "min_snr", weak=True), Put("objective.snr_gamma", value)]


def fixed_snr(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """ai-toolkit's `snr_gamma`, which is not the published weight."""
    outcomes = min_snr(value, block)
    return [*outcomes, Said(f"is read as min_snr_gamma; {NO_CAP}")] if outcomes else []


def simpletuner_loss(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's `loss_type`."""
    if value == "smooth_l1":
        return [Put("objective.loss", "huber"), Said("is huber here, which is smooth_l1 times huber_delta")]
    if value in ("l2", "huber"):
        return [Put("objective.loss", "mse" if value == "l2" else "huber")]
    return [No(f'{shown(value)} is not available; allowed: "l2", "huber", "smooth_l1"')]


def huber_delta(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's `huber_c`, which is given whether or not it is used."""
    if beside(block, "loss_type") in ("huber", "smooth_l1"):
        return [Put("objective.huber_delta", value)]
    return [Said("has no effect: loss_type is not huber")]


def huber_schedule(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's `huber_schedule`."""
    if value == "constant" or beside(block, "loss_type") not in ("huber", "smooth_l1"):
        return []
    return [Said("has no effect: objective.huber_delta is the same at every noise level")]


def ai_toolkit_loss(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """ai-toolkit's `train.loss_type`."""
    if value == "mse":
        return [Put("objective.loss", "mse")]
    return [Said(f"{shown(value)} is not available; objective.loss is used")]
