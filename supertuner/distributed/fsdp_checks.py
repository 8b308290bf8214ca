"""What cannot be done with weights that are shared out over processes: refused before anything is loaded. Pure."""

from __future__ import annotations

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import TrainError
from supertuner.optim.optimizer_registry import OPTIMIZERS


def require_fsdp_supported(config: RunConfig) -> None:
    """TrainError with the reason, where the settings ask for what parts of tensors cannot give."""
    kind = config.model.base_weights
    if kind != "as_computed":
        raise TrainError(
            f'model.base_weights is "{kind}" and parallel.strategy "fsdp": torchao\'s tensors of 8 bits cannot be cut '
            'into parts; set model.base_weights: "as_computed", or parallel.strategy: "ddp"'
        )
    name = config.optimizer.name
    if config.adapter.type == "full" and not OPTIMIZERS[name].elementwise:
        others = " or ".join(f'"{key}"' for key, entry in OPTIMIZERS.items() if entry.elementwise)
        raise TrainError(
            f'optimizer.name is "{name}", adapter.type "full" and parallel.strategy "fsdp": what it does with a weight '
            f"depends on others of the same tensor, and no process has a whole one; use {others}, an adapter, or "
            'parallel.strategy: "ddp"'
        )
    plan_overrides = {
        setting: value for setting, value in config.plan.explicit_choices.items() if setting != "idle_experts"
    }
    if config.plan.act != "never" and plan_overrides:
        settings_text = ", ".join(f"plan.{setting}: {value}" for setting, value in plan_overrides.items())
        raise TrainError(
            f'parallel.strategy is "fsdp", and {settings_text} asks for a plan of one process: FSDP moves the weights itself; '
            'leave it out (see parallel.cpu_offload), or set parallel.strategy: "ddp"'
        )
