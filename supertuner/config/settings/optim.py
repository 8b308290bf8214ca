"""Settings of the optimizer and its learning rate, per expert where a model has two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from supertuner.config.settings.block import Block, Remark

USUAL_MIN_LR, USUAL_MAX_LR = 1e-7, 1e-3
"""Between what Automagic's rates move where nothing is said."""
Rate = Annotated[float | None, Field(gt=0, le=10)]


class OptimizerSettings(Block):
    name: Literal["adamw", "adamw8bit", "adafactor", "prodigy", "schedule_free", "automagic"] = "adamw"
    """Which optimizer."""
    learning_rate: Rate = None
    """Learning rate; unset: the optimizer's own default. Automagic: where every weight's rate starts."""
    weight_decay: Annotated[float | None, Field(ge=0)] = None
    """Decoupled weight decay; unset: the optimizer's own default."""
    lr_scheduler: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate falls after warm-up, in optimizer steps."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises from zero."""
    lr_bump: Rate = None
    """Automagic: how far a weight's rate moves in one step; unset: 1e-6."""
    min_lr: Rate = None
    """Automagic: a weight's lowest rate; unset: 1e-7."""
    max_lr: Rate = None
    """Automagic: a weight's highest rate; unset: 1e-3."""
    high_noise_lr: Rate = None
    """Learning rate of the high-noise expert; unset: `learning_rate`."""
    high_noise_lr_bump: Rate = None
    """Automagic's `lr_bump` on the high-noise expert; unset: `lr_bump`."""
    high_noise_min_lr: Rate = None
    """Automagic's `min_lr` on the high-noise expert; unset: `min_lr`."""
    high_noise_max_lr: Rate = None
    """Automagic's `max_lr` on the high-noise expert; unset: `max_lr`."""
    low_noise_lr: Rate = None
    """Learning rate of the low-noise expert; unset: `learning_rate`."""
    low_noise_lr_bump: Rate = None
    """Automagic's `lr_bump` on the low-noise expert; unset: `lr_bump`."""
    low_noise_min_lr: Rate = None
    """Automagic's `min_lr` on the low-noise expert; unset: `min_lr`."""
    low_noise_max_lr: Rate = None
    """Automagic's `max_lr` on the low-noise expert; unset: `max_lr`."""

    def contradictions(self) -> Iterator[Remark]:
        for stage in ("", "high_noise_", "low_noise_"):
            lowest, highest = (self._set_by(stage, what) for what in ("min_lr", "max_lr"))
            if stage and not (lowest.startswith(stage) or highest.startswith(stage)):
                continue  # both are those of all experts
            low, high = getattr(self, lowest), getattr(self, highest)
            if low is not None and high is not None and high < low:
                yield Remark(highest, f"{high:g} is below {lowest} {low:g}", (lowest,))
            if self.name == "automagic" and high is None and low is not None and low > USUAL_MAX_LR:
                message = f"{low:g} is above {highest}, which is {USUAL_MAX_LR:g} unless it is set; set both"
                yield from () if self._replaced(stage, "max_lr") else (Remark(lowest, message),)
            if self.name == "automagic" and low is None and high is not None and high < USUAL_MIN_LR:
                message = f"{high:g} is below {lowest}, which is {USUAL_MIN_LR:g} unless it is set; set both"
                yield from () if self._replaced(stage, "min_lr") else (Remark(highest, message),)

    def _replaced(self, stage: str, what: str) -> bool:
        """Whether what holds for all experts holds for none of them."""
        return not stage and all(getattr(self, one + what) is not None for one in ("high_noise_", "low_noise_"))

    def _set_by(self, stage: str, what: str) -> str:
        """The setting that decides for a stage: its own if it is given."""
        return what if getattr(self, stage + what) is None else stage + what

    def doubts(self) -> Iterator[Remark]:
        if self.name == "schedule_free" and self.lr_scheduler != "constant":
            message = f'"{self.lr_scheduler}" works against schedule_free, which replaces a schedule; leave it out'
            yield Remark("lr_scheduler", message)
        if self.name == "prodigy" and self.learning_rate is not None and self.learning_rate < 0.01:
            message = f"{self.learning_rate:g} multiplies the rate that prodigy finds by itself; 1 is the usual value"
            yield Remark("learning_rate", message)
        if self.name == "automagic":
            return
        for stage in ("", "high_noise_", "low_noise_"):
            for what in ("lr_bump", "min_lr", "max_lr"):
                if getattr(self, stage + what) is not None:
                    yield Remark(stage + what, f'has an effect only with name: "automagic", not "{self.name}"')
