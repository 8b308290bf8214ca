"""Settings of the optimizer and its learning rates, also per expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from supertuner.config.families import expert_names
from supertuner.config.settings.block import SettingsBlock, SettingsIssue, with_fields
from supertuner.config.settings.data import UnitFraction

DEFAULT_MIN_LR, DEFAULT_MAX_LR = 1e-7, 1e-3
"""The default range of Automagic's learning rates."""
LearningRate = Annotated[float | None, Field(gt=0, le=10)]
EXPERT_PREFIXES = tuple(f"{expert}_" for expert in expert_names())


def _expert_fields(expert: str) -> dict[str, tuple[Any, Any]]:
    """An expert's own learning rates."""
    title = f"the {expert.replace('_', '-')} expert"
    descriptions = {
        "lr": f"Learning rate of {title}. Unset: `learning_rate`.",
        **{name: f"Automagic: `{name}` of {title}. Unset: `{name}`." for name in ("lr_bump", "min_lr", "max_lr")},
    }
    return {
        f"{expert}_{name}": (LearningRate, Field(default=None, description=text)) for name, text in descriptions.items()
    }


@with_fields({name: field for expert in expert_names() for name, field in _expert_fields(expert).items()})
class OptimizerSettings(SettingsBlock):
    name: Literal["adamw", "adamw8bit", "adafactor", "prodigy", "schedule_free", "lion", "automagic"] = "adamw"
    """The optimizer."""
    learning_rate: LearningRate = None
    """Learning rate. Automagic: the initial rate of every weight. Unset: the optimizer's default."""
    weight_decay: Annotated[float | None, Field(ge=0)] = None
    """Decoupled weight decay. Unset: the optimizer's default."""
    beta1: Annotated[float | None, Field(ge=0, lt=1)] = None
    """Decay of the average of gradients. Unset: the optimizer's default."""
    beta2: Annotated[float | None, Field(ge=0, lt=1)] = None
    """Decay of the average of squared gradients (lion: of the average of gradients). Unset: the optimizer's default."""
    epsilon: Annotated[float | None, Field(gt=0)] = None
    """Number added to the denominator of an update. Unset: the optimizer's default."""
    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"] = "constant"
    """Learning-rate schedule after warm-up, in optimizer steps."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises from 0."""
    lr_end_factor: UnitFraction = 0.0
    """Learning rate at the end of a falling schedule, as a fraction of the full rate."""
    lr_power: Annotated[float, Field(gt=0)] = 1.0
    """polynomial: power with which the rate falls; 1 is linear."""
    lr_cycles: Annotated[int, Field(ge=1)] = 1
    """cosine_with_restarts: number of times that the rate falls from the full rate to the end rate."""
    lr_bump: LearningRate = None
    """Automagic: change of a weight's learning rate in one step. Unset: 1e-6."""
    min_lr: LearningRate = None
    """Automagic: lowest learning rate of a weight. Unset: 1e-7."""
    max_lr: LearningRate = None
    """Automagic: highest learning rate of a weight. Unset: 1e-3."""

    def contradictions(self) -> Iterator[SettingsIssue]:
        for stage in ("", *EXPERT_PREFIXES):
            lowest, highest = (self._effective_field(stage, field) for field in ("min_lr", "max_lr"))
            if stage and not (lowest.startswith(stage) or highest.startswith(stage)):
                continue  # this expert overrides neither
            low, high = getattr(self, lowest), getattr(self, highest)
            if low is not None and high is not None and high < low:
                yield SettingsIssue(highest, f"{high:g} is below {lowest} {low:g}", (lowest,))
            if self.name == "automagic" and high is None and low is not None and low > DEFAULT_MAX_LR:
                message = f"{low:g} is above {highest}, which defaults to {DEFAULT_MAX_LR:g}; set both"
                yield from () if self._is_overridden_by_experts(stage, "max_lr") else (SettingsIssue(lowest, message),)
            if self.name == "automagic" and low is None and high is not None and high < DEFAULT_MIN_LR:
                message = f"{high:g} is below {lowest}, which defaults to {DEFAULT_MIN_LR:g}; set both"
                yield from () if self._is_overridden_by_experts(stage, "min_lr") else (SettingsIssue(highest, message),)

    def _is_overridden_by_experts(self, stage: str, field: str) -> bool:
        """Whether every expert overrides the setting `field`, so that its common value is not used."""
        return not stage and all(getattr(self, prefix + field) is not None for prefix in EXPERT_PREFIXES)

    def _effective_field(self, stage: str, field: str) -> str:
        """The name of the setting that counts for an expert: its own if it is set, else the common one."""
        return field if getattr(self, stage + field) is None else stage + field

    def warnings(self) -> Iterator[SettingsIssue]:
        if self.name == "schedule_free" and self.lr_scheduler != "constant":
            message = f'"{self.lr_scheduler}" conflicts with schedule_free, which replaces a schedule; remove it'
            yield SettingsIssue("lr_scheduler", message)
        if self.name == "prodigy" and self.learning_rate is not None and self.learning_rate < 0.01:
            message = (
                f"{self.learning_rate:g} multiplies the learning rate that prodigy estimates; the usual value is 1"
            )
            yield SettingsIssue("learning_rate", message)
        yield from self._unused_schedule_settings()
        for name in _UNUSED_FIELDS_BY_OPTIMIZER.get(self.name, ()):
            if getattr(self, name) is not None:
                yield SettingsIssue(name, f'has no effect with name: "{self.name}"')
        if self.name == "automagic":
            return
        for stage in ("", *EXPERT_PREFIXES):
            for field in ("lr_bump", "min_lr", "max_lr"):
                if getattr(self, stage + field) is not None:
                    yield SettingsIssue(stage + field, 'has no effect without name: "automagic"')

    def _unused_schedule_settings(self) -> Iterator[SettingsIssue]:
        if "lr_end_factor" in self.model_fields_set and self.lr_scheduler == "constant":
            yield SettingsIssue("lr_end_factor", 'has no effect with lr_scheduler: "constant"')
        for name, schedule in (("lr_power", "polynomial"), ("lr_cycles", "cosine_with_restarts")):
            if name in self.model_fields_set and self.lr_scheduler != schedule:
                yield SettingsIssue(name, f'has no effect without lr_scheduler: "{schedule}"')


_MOMENTS = ("beta1", "beta2", "epsilon")
_UNUSED_FIELDS_BY_OPTIMIZER = {
    "adafactor": _MOMENTS,
    "automagic": _MOMENTS,
    "lion": ("epsilon",),
    "schedule_free": ("beta1",),
}
