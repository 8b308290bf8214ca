"""Settings of what moves between GPU and host memory while training: the plan that a run follows, and wishes for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from supertuner.config.settings.block import SettingsBlock, SettingsIssue


class ForecastSettings(SettingsBlock):
    before_training: Literal["auto", "always", "never"] = "auto"
    """Work out whether the run fits into memory before anything is loaded, and say so in one line; "auto": on a GPU,
    and on a CPU where the model is not small beside its memory."""
    refuse: bool = True
    """End a run that cannot fit before it begins; otherwise it is only warned about."""


class PlanSettings(SettingsBlock):
    act: Literal["auto", "never"] = "auto"
    """Follow a plan: keep in GPU memory what fits there, and move the rest to host memory and back while the GPU
    computes; "auto": where the forecast made one, or a setting below asks for it."""
    weights: Literal["auto", "gpu", "streamed"] = "auto"
    """Where the weights of blocks live: in GPU memory, or in host memory and copied to the GPU ahead of each use."""
    activations: Literal["auto", "keep", "send", "recompute"] = "auto"
    """What becomes of blocks' activations until the backward pass: kept in GPU memory, sent to host memory and fetched
    again, or recomputed; "auto": as planned, or as `train.gradient_checkpointing` says where nothing is planned."""
    optimizer: Literal["auto", "gpu", "streamed", "host"] = "auto"
    """Where the optimizer's state lives: in GPU memory; in host memory, brought to the GPU piece by piece; or in host
    memory, where the CPU steps."""
    idle_experts: Literal["auto", "gpu", "host"] = "auto"
    """Where an expert waits while another one is trained or sampled from."""
    ahead: Annotated[int | None, Field(ge=0, le=64)] = None
    """How many blocks before its use a streamed block is fetched; unset: as planned, and more where the GPU waits."""
    check_every_windows: Annotated[int, Field(ge=0)] = 20
    """Windows between two comparisons of what was measured with what was planned; 0: none, and the plan stays."""

    @property
    def explicit_choices(self) -> dict[str, str]:
        """What is asked for whatever was planned."""
        choices = {
            "weights": self.weights,
            "activations": self.activations,
            "optimizer": self.optimizer,
            "idle_experts": self.idle_experts,
        }
        return {name: value for name, value in choices.items() if value != "auto"}

    def warnings(self) -> Iterator[SettingsIssue]:
        for name in self.explicit_choices:
            if self.act == "never":
                yield SettingsIssue(name, 'has no effect while act is "never"')
