"""Settings of the forecast, and of the plan that moves data between GPU and host memory during training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from supertuner.config.settings.block import SettingsBlock, SettingsIssue


class ForecastSettings(SettingsBlock):
    before_training: Literal["auto", "always", "never"] = "auto"
    """Forecast whether the run fits into memory before anything is loaded, and print the result. "auto": on a GPU, and
    on a CPU if the model is not small compared with the memory."""
    refuse: bool = True
    """Refuse to start a run that does not fit. false: only warn."""


class PlanSettings(SettingsBlock):
    act: Literal["auto", "never"] = "auto"
    """Follow a plan: keep in GPU memory what fits, and move the rest to host memory and back while the GPU computes.
    "auto": if the forecast made a plan, or a setting of this block is not "auto". Where CPU and GPU share one memory,
    settings of this block that keep something in host memory have no effect."""
    weights: Literal["auto", "gpu", "streamed"] = "auto"
    """Where the weights of transformer blocks are: in GPU memory, or in host memory and copied to the GPU before each
    use."""
    activations: Literal["auto", "keep", "send", "recompute"] = "auto"
    """What happens to the activations of blocks until the backward pass: they are kept in GPU memory, sent to host
    memory and fetched back, or recomputed. "auto": as planned; without a plan, by `train.gradient_checkpointing`."""
    optimizer: Literal["auto", "gpu", "streamed", "host"] = "auto"
    """Where the optimizer state is: in GPU memory; in host memory and copied to the GPU piece by piece ("streamed"); or
    in host memory, where the CPU computes the optimizer step ("host")."""
    idle_experts: Literal["auto", "gpu", "host"] = "auto"
    """Where the weights of an expert are while another expert is trained or sampled."""
    ahead: Annotated[int | None, Field(ge=0, le=64)] = None
    """How many blocks ahead streamed weights are prefetched. Unset: as planned, and more if the GPU waits for them."""
    check_every_windows: Annotated[int, Field(ge=0)] = 20
    """Windows between two comparisons of measured with planned times; 0: no comparison, and the plan never changes."""

    @property
    def explicit_choices(self) -> dict[str, str]:
        """The settings that override the plan: those that are not "auto"."""
        names = ("weights", "activations", "optimizer", "idle_experts")
        return {name: getattr(self, name) for name in names if getattr(self, name) != "auto"}

    def warnings(self) -> Iterator[SettingsIssue]:
        for name in self.explicit_choices:
            if self.act == "never":
                yield SettingsIssue(name, 'has no effect while act is "never"')
