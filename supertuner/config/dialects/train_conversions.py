"""How foreign words about averages, checkpoints, samples and reports become settings of ours. Pure, as conversions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from supertuner.config.dialects.conversions import Convert, No, Outcome, Put, Said, beside
from supertuner.config.sources.values import shown
from supertuner.core.types import JSON


def use_ema(unsaid: float) -> Convert:
    """The switch; the decay beside it, or the one that they use when nothing is said."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
        if not isinstance(value, bool):
            return [No(f"{shown(value)} is not true or false")]
        if not value or beside(block, "ema_decay") is not None:
            return []
        return [Put("train.ema_decay", unsaid, weak=True), Said(f"ema_decay is not given: {unsaid:g}")]

    return convert


def ema_decay(on_unless_said: bool) -> Convert:
    """The decay, which counts only if the average is wanted."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
        wanted = beside(block, "use_ema")
        if wanted is True or (wanted is None and on_unless_said):
            return [Put("train.ema_decay", value)]
        return [Said("has no effect: use_ema is not true")]

    return convert


def no_ema_block(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """ai-toolkit's `ema_config` where it is not a block."""
    return [] if value in (None, False) else [No(f"{shown(value)} is not a block; it holds use_ema and ema_decay")]


def resume(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    return [Put("checkpoints.resume", value)] if value else []


def prompt(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's one `validation_prompt`."""
    if not value and value != 0:
        return []
    return [Put("validation.prompts", [value if isinstance(value, str) else shown(value)])]


def prompts(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """ai-toolkit's `sample.prompts`."""
    if not isinstance(value, list):
        return [No(f"{shown(value)} is not a list of prompts")]
    marked = any(isinstance(one, str) and "[trigger]" in one for one in value)
    said = [Said("[trigger] is not replaced in prompts of samples; write the word itself")] if marked else []
    return [Put("validation.prompts", list(value)), *said]


def samples(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """ai-toolkit's `sample.samples`: prompts with settings of their own, of which the prompts are read."""
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        return [No(f"{shown(value)} is not a list of blocks with a prompt each")]
    found = [one["prompt"] for one in value if isinstance(one, Mapping) and one.get("prompt") is not None]
    extra = sorted({str(name) for one in value if isinstance(one, Mapping) for name in one} - {"prompt"})
    said = [Said(f"of each sample only the prompt is read, not {', '.join(extra)}")] if extra else []
    return [*prompts(found, block), *said]


def seeds(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's `validation_seed` and `num_validation_images`: so many seeds from there on."""
    first, many = beside(block, "validation_seed"), beside(block, "num_validation_images")
    first, many = 0 if first is None else first, 1 if many is None else many
    if not _is_whole(first) or not _is_whole(many) or not 1 <= many <= 64:
        return [No(f"{shown(value)} is not a whole number that a seed or a number of images up to 64 can be")]
    return [Put("validation.seeds", list(range(first, first + many)))]


def seed(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """ai-toolkit's `sample.seed`."""
    return [] if value is None else [Put("validation.seeds", [value])]


def size(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's `validation_resolution`: a side, megapixels, `1024x576`, or several of these after commas."""
    first, *others = [part.strip() for part in str(value).lower().split(",")]
    sides = re.fullmatch(r"(\d{1,6})x(\d{1,6})", first)
    side = re.fullmatch(r"\d{1,6}(\.\d{1,6})?", first)
    if sides:
        width, height = int(sides[1]), int(sides[2])
    elif side:
        number = float(first)
        width = height = int(number) if number >= 16 else round(math.sqrt(number * 1e6) / 64) * 64
    else:
        return [No(f'{shown(value)} is not a size; write 1024 or "1024x576"')]
    said = [Said(f"samples have one size here: {width} × {height}")] if others else []
    return [Put("validation.width", width), Put("validation.height", height), *said]


def validation_interval(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's `validation_step_interval`, unless validation is turned off beside it."""
    if beside(block, "validation_disable") is True or value in (None, 0):
        return []
    return [Put("validation.every_steps", value)]


def no_validation(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """`validation_disable` and ai-toolkit's `disable_sampling`."""
    if not isinstance(value, bool):
        return [No(f"{shown(value)} is not true or false")]
    if not value:
        return []
    off = [Put(f"validation.{name}", False) for name in ("at_start", "at_end")]
    return [*off, Put("validation.every_steps", None)]


def at_start(unless: bool, weak: bool = False) -> Convert:
    """A switch about samples before the first step; `unless`: true means none."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
        if not isinstance(value, bool):
            return [No(f"{shown(value)} is not true or false")]
        return [Put("validation.at_start", value != unless, weak=weak)]

    return convert


def sample_interval(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """ai-toolkit's `sample_every`. It samples before the first step too; `train` may turn either off."""
    if value in (None, 0):
        return []
    return [Put("validation.every_steps", value, weak=True), Put("validation.at_start", True, weak=True)]


def report_to(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's trackers, one or several after commas."""
    names = {part.strip() for part in str(value).lower().split(",")} - {"", "none"}
    if "all" in names:
        names = {"tensorboard", "wandb"}
    unknown = sorted(names - {"tensorboard", "wandb"})
    outcomes: list[Outcome] = [Put("report.tensorboard", "tensorboard" in names)]
    if "wandb" in names:
        outcomes.append(Put("report.wandb", beside(block, "tracker_project_name") or "simpletuner"))
    if unknown:
        outcomes.append(Said(f"{', '.join(unknown)} is not available; allowed: tensorboard, wandb, none"))
    return outcomes


def project(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's `tracker_project_name`, which `report_to` reads."""
    return [] if "wandb" in str(beside(block, "report_to")) else [Said("has no effect: nothing is reported to wandb")]


def use_wandb(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """ai-toolkit's `logging.use_wandb`."""
    if not isinstance(value, bool):
        return [No(f"{shown(value)} is not true or false")]
    return [Put("report.wandb", block.get("project_name") or "ai-toolkit")] if value else []


def _is_whole(value: JSON) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
