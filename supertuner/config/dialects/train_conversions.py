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

SAMPLE_ENTRY_KEYS = frozenset(
    [
        "prompt",
        "width",
        "height",
        "neg",
        "seed",
        "guidance_scale",
        "sample_steps",
        "fps",
        "num_frames",
        "ctrl_img",
        "ctrl_idx",
        "ctrl_img_1",
        "ctrl_img_2",
        "ctrl_img_3",
        "network_multiplier",
        "do_cfg_norm",
    ]
)
"""The keys of an entry of ai-toolkit's `sample.samples`, of which only `prompt` is read."""
FORMATS = ("diffusers", "comfyui", "kohya")
"""Names of tensors in exported files."""
UNCAPPED_WEIGHT_NOTE = "ai-toolkit weights every sample by γ / SNR; here the weight is at most 1"


def use_ema(default_decay: float) -> KeyConversion:
    """`use_ema`: true sets the dialect's default decay, unless `ema_decay` is given."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
        if not isinstance(value, bool):
            return [not_a_switch(value)]
        if not value or sibling_value(block, "ema_decay") is not None:
            return []
        note = ConversionNote(f"sets train.ema_decay: {default_decay:g}, the default")
        return [SettingValue("train.ema_decay", _decay_per_step(default_decay, block), is_implied=True), note]

    return convert


def ema_decay(enabled_by_default: bool) -> KeyConversion:
    """`ema_decay`, which counts only if EMA is on."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
        enabled = sibling_value(block, "use_ema")
        if enabled is True or (enabled is None and enabled_by_default):
            return [SettingValue("train.ema_decay", _decay_per_step(value, block))]
        return []

    return convert


def _decay_per_step(decay: JSON, block: Mapping[str, JSON]) -> JSON:
    """The decay with which an update after every step forgets as fast as one every `ema_update_interval` steps."""
    interval = sibling_value(block, "ema_update_interval")
    if not isinstance(decay, float) or not _is_whole_number(interval) or interval < 2 or not 0 < decay < 1:
        return decay
    per_step: float = decay ** (1 / interval)
    return round(per_step, 12)


def ema_interval(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `ema_update_interval`; `_decay_per_step` reads it."""
    if sibling_value(block, "use_ema") is not True or value in (None, 0, 1):
        return []
    return [ConversionNote("the average is updated after every step, with a decay that forgets as fast")]


def disabled_ema(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `ema_config` if it is not a block."""
    problem = InvalidValue(f"{format_value(value)} is not a block; it holds use_ema and ema_decay")
    return [] if value in (None, False) else [problem]


def simpletuner_seed(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `seed`, with which 0 and -1 stand for another seed at each start."""
    if value in (0, -1):
        return [ConversionNote("is a new seed at each start in SimpleTuner; here run.seed is 0, so that runs repeat")]
    return [] if value is None else [SettingValue("run.seed", value)]


def train_denoiser(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `train_unet`."""
    if value is False:
        return [InvalidValue("false: nothing would be trained, because text encoders are not; set it to true")]
    return [] if isinstance(value, bool) else [not_a_switch(value)]


def linear_timesteps(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `linear_timesteps` and `linear_timesteps2`."""
    if value is not True:
        return []
    settings: dict[str, JSON] = {"timesteps": "uniform", "shift": 1.0}
    return [SettingValue(f"objective.{name}", setting, is_implied=True) for name, setting in settings.items()]


def ai_toolkit_learning_rate(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `lr`; for Prodigy it replaces rates below 0.1 by 1."""
    estimates = str(block.get("optimizer", "")).lower().startswith(("prodigy", "dadapt"))
    if estimates and isinstance(value, float) and value < 0.1:
        note = ConversionNote("this optimizer estimates its rate, so that 1.0 is used, as ai-toolkit does")
        return [SettingValue("optimizer.learning_rate", 1.0), note]
    return [SettingValue("optimizer.learning_rate", value)]


def saves_to_keep(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """How many saves are kept; in the other programs a save is a checkpoint and the file to use."""
    if value in (0, -1, None):
        return []
    return [SettingValue("checkpoints.keep", value), SettingValue("exports.keep", value, is_implied=True)]


def export_format(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `lora_format`, the names in the exported file."""
    if value in (None, "", "auto"):
        return []
    return [SettingValue("exports.formats", [value])] if value in FORMATS else [not_available(value, FORMATS)]


def push_to_hub(repository_key: str) -> KeyConversion:
    """The switch that pushes to the repository that another key of the block names."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
        if not isinstance(value, bool):
            return [] if value is None else [not_a_switch(value)]
        repository = sibling_value(block, repository_key)
        if not value:
            return []
        if isinstance(repository, str) and "/" in repository:
            return [SettingValue("exports.push_to_hub", repository)]
        return [ConversionNote(f"has no effect: {repository_key} does not name a repository as OWNER/NAME")]

    return convert


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
    names = {str(name) for entry in entries for name in entry}
    if unknown := sorted(names - SAMPLE_ENTRY_KEYS):
        known = ", ".join(sorted(SAMPLE_ENTRY_KEYS))
        return [InvalidValue(f"{', '.join(unknown)}: not a key of a sample; known here: {known}")]
    extra = sorted(names - {"prompt"})
    notes = [ConversionNote(f"only the prompts are read, not {', '.join(extra)}")] if extra else []
    return [*sample_prompts(prompt_texts, block), *notes]


def negative_prompt(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `sample.neg`."""
    return [] if value in (None, False) else [SettingValue("validation.negative_prompt", value)]


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


def eval_interval(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `eval_steps_interval`, which counts if no validation interval is set."""
    return [] if value in (None, 0) else [SettingValue("validation.every_steps", value, is_implied=True)]


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
    return []


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
