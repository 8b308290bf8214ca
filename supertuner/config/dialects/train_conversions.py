"""Conversions of dialect keys about losses, EMA, checkpoints, validation and reports. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TypeGuard

from supertuner.config.dialects.conversions import (
    ConversionNote,
    InvalidValue,
    KeyConversion,
    Outcomes,
    SettingValue,
    not_a_switch,
    not_available,
    sibling_value,
    switch_to,
)
from supertuner.config.settings.values import format_value
from supertuner.core.types import JSON

UNCAPPED_WEIGHT_NOTE = "ai-toolkit weights every sample by γ / SNR; here the weight is at most 1"


def use_ema(default_decay: float) -> KeyConversion:
    """`use_ema`: true sets the dialect's default decay, unless `ema_decay` is given."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
        if not isinstance(value, bool):
            return [not_a_switch(value)]
        if not value or sibling_value(block, "ema_decay") is not None:
            return []
        note = ConversionNote(f"sets train.ema_decay: {default_decay:g}, the default")
        return [SettingValue("train.ema_decay", default_decay, is_implied=True), note]

    return convert


def ema_decay(enabled_by_default: bool) -> KeyConversion:
    """`ema_decay`, which counts only if EMA is on."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
        enabled = sibling_value(block, "use_ema")
        if enabled is True or (enabled is None and enabled_by_default):
            return [SettingValue("train.ema_decay", value)]
        return [ConversionNote("has no effect: use_ema is not true")]

    return convert


def disabled_ema(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `ema_config` if it is not a block."""
    problem = InvalidValue(f"{format_value(value)} is not a block; it holds use_ema and ema_decay")
    return [] if value in (None, False) else [problem]


def resume(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    return [SettingValue("checkpoints.resume", value)] if value else []


def validation_prompt(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's one `validation_prompt`."""
    if not value and value != 0:
        return []
    return [SettingValue("validation.prompts", [value if isinstance(value, str) else format_value(value)])]


def sample_prompts(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `sample.prompts`."""
    if not isinstance(value, list):
        return [InvalidValue(f"{format_value(value)} is not a list of prompts")]
    setting = SettingValue("validation.prompts", list(value))
    if not any(isinstance(prompt, str) and "[trigger]" in prompt for prompt in value):
        return [setting]
    return [setting, ConversionNote("[trigger] is not replaced in these prompts; write the trigger word itself")]


def sample_entries(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `sample.samples`: prompts with individual settings, of which only the prompts are read."""
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        return [InvalidValue(f"{format_value(value)} is not a list of blocks with a prompt each")]
    entries = [entry for entry in value if isinstance(entry, Mapping)]
    prompt_texts = [entry["prompt"] for entry in entries if entry.get("prompt") is not None]
    extra = sorted({str(name) for entry in entries for name in entry} - {"prompt"})
    notes = [ConversionNote(f"only the prompts are read, not {', '.join(extra)}")] if extra else []
    return [*sample_prompts(prompt_texts, block), *notes]


def validation_seeds(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `validation_seed` and `num_validation_images`: that many consecutive seeds."""
    first, count = sibling_value(block, "validation_seed"), sibling_value(block, "num_validation_images")
    first, count = 0 if first is None else first, 1 if count is None else count
    if not _is_whole_number(first) or not _is_whole_number(count) or not 1 <= count <= 64:
        rule = "validation_seed is a whole number, and num_validation_images one from 1 to 64"
        return [InvalidValue(f"{format_value(value)} is not valid: {rule}")]
    return [SettingValue("validation.seeds", list(range(first, first + count)))]


def sample_seed(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `sample.seed`."""
    return [] if value is None else [SettingValue("validation.seeds", [value])]


def validation_resolution(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `validation_resolution`: a side, megapixels, `1024x576`, or a list of these separated by commas."""
    first, *others = [part.strip() for part in str(value).lower().split(",")]
    sides = re.fullmatch(r"(\d{1,6})x(\d{1,6})", first)
    side = re.fullmatch(r"\d{1,6}(\.\d{1,6})?", first)
    if sides:
        width, height = int(sides[1]), int(sides[2])
    elif side:
        number = float(first)
        width = height = int(number) if number >= 16 else round(math.sqrt(number * 1e6) / 64) * 64
    else:
        return [InvalidValue(f'{format_value(value)} is not a size; write 1024 or "1024x576"')]
    notes = [ConversionNote(f"only the first size is used: {width} × {height}")] if others else []
    return [SettingValue("validation.width", width), SettingValue("validation.height", height), *notes]


def validation_interval(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `validation_step_interval`; ignored with `validation_disable`."""
    if sibling_value(block, "validation_disable") is True or value in (None, 0):
        return []
    return [SettingValue("validation.every_steps", value)]


def disable_validation(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """`validation_disable` and ai-toolkit's `disable_sampling`."""
    if not isinstance(value, bool):
        return [not_a_switch(value)]
    if not value:
        return []
    switches = [SettingValue(f"validation.{name}", False) for name in ("at_start", "at_end")]
    return [*switches, SettingValue("validation.every_steps", None)]


def validate_at_start(inverted: bool, is_implied: bool = False) -> KeyConversion:
    """A switch for a validation before the first step; `inverted`: true turns it off."""
    return switch_to("validation.at_start", not inverted, inverted, is_implied)


def sample_interval(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `sample_every`. ai-toolkit also samples before the first step; keys of `train` can turn both off."""
    if value in (None, 0):
        return []
    settings: dict[str, JSON] = {"every_steps": value, "at_start": True}
    return [SettingValue(f"validation.{name}", setting, is_implied=True) for name, setting in settings.items()]


def report_to(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `report_to`: trackers, separated by commas."""
    names = {part.strip() for part in str(value).lower().split(",")} - {"", "none"}
    if "all" in names:
        names = {"tensorboard", "wandb"}
    unknown = sorted(names - {"tensorboard", "wandb"})
    outcomes: list[SettingValue | ConversionNote] = [SettingValue("report.tensorboard", "tensorboard" in names)]
    if "wandb" in names:
        outcomes.append(SettingValue("report.wandb", sibling_value(block, "tracker_project_name") or "simpletuner"))
    if unknown:
        outcomes.append(ConversionNote(f"{', '.join(unknown)} is not available; allowed: tensorboard, wandb, none"))
    return outcomes


def tracker_project_name(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `tracker_project_name`, which `report_to` reads."""
    reports = "wandb" in str(sibling_value(block, "report_to"))
    return [] if reports else [ConversionNote("has no effect: nothing is reported to wandb")]


def use_wandb(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `logging.use_wandb`."""
    if not isinstance(value, bool):
        return [not_a_switch(value)]
    return [SettingValue("report.wandb", block.get("project_name") or "ai-toolkit")] if value else []


def _is_whole_number(value: JSON) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


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
