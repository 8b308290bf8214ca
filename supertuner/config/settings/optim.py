"""Settings of the optimizer and its learning rate, per expert where a model has two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from supertuner.config.settings.block import SettingsBlock, SettingsIssue

DEFAULT_MIN_LR, DEFAULT_MAX_LR = 1e-7, 1e-3
"""Between what Automagic's rates move where nothing is said."""
LearningRate = Annotated[float | None, Field(gt=0, le=10)]


class OptimizerSettings(SettingsBlock):
    name: Literal["adamw", "adamw8bit", "adafactor", "prodigy", "schedule_free", "automagic"] = "adamw"
    """Which optimizer."""
    learning_rate: LearningRate = None
    """Learning rate; unset: the optimizer's own default. Automagic: where every weight's rate starts."""
    weight_decay: Annotated[float | None, Field(ge=0)] = None
    """Decoupled weight decay; unset: the optimizer's own default."""
    lr_scheduler: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate falls after warm-up, in optimizer steps."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises from zero."""
    lr_bump: LearningRate = None
    """Automagic: how far a weight's rate moves in one step; unset: 1e-6."""
    min_lr: LearningRate = None
    """Automagic: a weight's lowest rate; unset: 1e-7."""
    max_lr: LearningRate = None
    """Automagic: a weight's highest rate; unset: 1e-3."""
    high_noise_lr: LearningRate = None
    """Learning rate of the high-noise expert; unset: `learning_rate`."""
    high_noise_lr_bump: LearningRate = None
    """Automagic's `lr_bump` on the high-noise expert; unset: `lr_bump`."""
    high_noise_min_lr: LearningRate = None
    """Automagic's `min_lr` on the high-noise expert; unset: `min_lr`."""
    high_noise_max_lr: LearningRate = None
    """Automagic's `max_lr` on the high-noise expert; unset: `max_lr`."""
    low_noise_lr: LearningRate = None
    """Learning rate of the low-noise expert; unset: `learning_rate`."""
    low_noise_lr_bump: LearningRate = None
    """Automagic's `lr_bump` on the low-noise expert; unset: `lr_bump`."""
    low_noise_min_lr: LearningRate = None
    """Automagic's `min_lr` on the low-noise expert; unset: `min_lr`."""
    low_noise_max_lr: LearningRate = None
    """Automagic's `max_lr` on the low-noise expert; unset: `max_lr`."""

    def contradictions(self) -> Iterator[SettingsIssue]:
        for stage in ("", "high_noise_", "low_noise_"):
            lowest, highest = (self._effective_field(stage, field) for field in ("min_lr", "max_lr"))
            if stage and not (lowest.startswith(stage) or highest.startswith(stage)):
                continue  # both are those of all experts
            low, high = getattr(self, lowest), getattr(self, highest)
            if low is not None and high is not None and high < low:
                yield SettingsIssue(highest, f"{high:g} is below {lowest} {low:g}", (lowest,))
            if self.name == "automagic" and high is None and low is not None and low > DEFAULT_MAX_LR:
                message = f"{low:g} is above {highest}, which is {DEFAULT_MAX_LR:g} unless it is set; set both"
                yield from () if self._is_overridden_by_experts(stage, "max_lr") else (SettingsIssue(lowest, message),)
            if self.name == "automagic" and low is None and high is not None and high < DEFAULT_MIN_LR:
                message = f"{high:g} is below {lowest}, which is {DEFAULT_MIN_LR:g} unless it is set; set both"
                yield from () if self._is_overridden_by_experts(stage, "min_lr") else (SettingsIssue(highest, message),)

    def _is_overridden_by_experts(self, stage: str, field: str) -> bool:
        """Whether what holds for all experts holds for none of them."""
        return not stage and all(
            getattr(self, expert_prefix + field) is not None for expert_prefix in ("high_noise_", "low_noise_")
        )

    def _effective_field(self, stage: str, field: str) -> str:
        """The setting that decides for a stage: its own if it is given."""
        return field if getattr(self, stage + field) is None else stage + field

    def warnings(self) -> Iterator[SettingsIssue]:
        if self.name == "schedule_free" and self.lr_scheduler != "constant":
            message = f'"{self.lr_scheduler}" works against schedule_free, which replaces a schedule; leave it out'
            yield SettingsIssue("lr_scheduler", message)
        if self.name == "prodigy" and self.learning_rate is not None and self.learning_rate < 0.01:
            message = f"{self.learning_rate:g} multiplies the rate that prodigy finds by itself; 1 is the usual value"
            yield SettingsIssue("learning_rate", message)
        if self.name == "automagic":
            return
        for stage in ("", "high_noise_", "low_noise_"):
            for field in ("lr_bump", "min_lr", "max_lr"):
                if getattr(self, stage + field) is not None:
                    yield SettingsIssue(stage + field, f'has an effect only with name: "automagic", not "{self.name}"')
