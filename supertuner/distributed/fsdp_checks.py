"""What cannot be done with weights that are shared out over processes: refused before anything is loaded. Pure."""

from __future__ import annotations

from supertuner.config.settings.tree import RunConfig
from supertuner.core.errors import TrainError
from supertuner.optim.table import OPTIMIZERS


def require_shareable(config: RunConfig) -> None:
    """TrainError with the reason, where the settings ask for what parts of tensors cannot give."""
    kind = config.model.base_weights
    if kind != "as_computed":
        raise TrainError(
            f'model.base_weights is "{kind}" and parallel.strategy "fsdp": torchao\'s tensors of 8 bits cannot be cut '
            'into parts; set model.base_weights: "as_computed", or parallel.strategy: "ddp"'
        )
    name = config.optimizer.name
    if config.adapter.type == "full" and not OPTIMIZERS[name].each_weight_alone:
        others = " or ".join(f'"{key}"' for key, entry in OPTIMIZERS.items() if entry.each_weight_alone)
        raise TrainError(
            f'optimizer.name is "{name}", adapter.type "full" and parallel.strategy "fsdp": what it does with a weight '
            f"depends on others of the same tensor, and no process has a whole one; use {others}, an adapter, or "
            'parallel.strategy: "ddp"'
        )
    wishes = {setting: value for setting, value in config.plan.wishes.items() if setting != "idle_experts"}
    if config.plan.act != "never" and wishes:
        asked = ", ".join(f"plan.{setting}: {value}" for setting, value in wishes.items())
        raise TrainError(
            f'parallel.strategy is "fsdp", and {asked} asks for a plan of one process: FSDP moves the weights itself; '
            'leave it out (see parallel.cpu_offload), or set parallel.strategy: "ddp"'
        )
