"""Adapters of LyCORIS (arXiv 2309.14859) by lycoris-lora: LoCon, LoHa, LoKr, and full weight differences (diff).

The adapter modules are submodules of the layers that they adapt, not a network beside the model, so that moving,
compiling, sharding or checkpointing a block includes them. Their output is added to the layer's output ("bypass")
instead of their product to its weight, because a small difference added to a bf16 weight would be rounded away.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import nn

from supertuner.config.settings.model import AdapterSettings
from supertuner.models.adapters.layers import AdapterSize, trainable_parameters
from supertuner.models.spec import Tensors

SUBMODULE_NAME = "lycoris"
"""The adapter's name as a submodule of its layer. It does not occur in our parameter names."""
KEY_PREFIX = "lycoris_"
"""The prefix of layer names in files of lycoris-lora, which also replaces dots by underscores."""
SCALED_TENSORS = ("lora_up.weight", "hada_w2_a", "lokr_w2", "lokr_w2_b")
"""The tensor of each adapter type that is zero at first; in a file the scale is multiplied into it."""


def inject(
    module: nn.Module, settings: AdapterSettings, layers: Mapping[str, AdapterSize], *, seed: int, name: str
) -> dict[str, nn.Parameter]:
    """Attach adapters to the layers and freeze all other parameters; return the adapters' fp32 parameters by name.

    lycoris-lora draws initial values from torch's global generator, which is seeded for each layer and then restored.
    """
    module.requires_grad_(False)
    with torch.random.fork_rng(devices=[]), _quiet_logger():
        for key, size in layers.items():
            layer = module.get_submodule(key)
            torch.default_generator.manual_seed(xxhash.xxh32_intdigest(f"{seed}\0{name}\0{key}".encode()))
            device = next(layer.parameters()).device
            adapter = _build_adapter(key, layer, settings, size).to(device, torch.float32).requires_grad_(True)
            adapter.apply_to()
            layer.add_module(SUBMODULE_NAME, adapter)
    return trainable_parameters(module, SUBMODULE_NAME)


def export_tensors(module: nn.Module, layers: Mapping[str, AdapterSize]) -> Tensors:
    """The tensors of a file for lycoris-lora's loader, with its names.

    The scale is multiplied into one tensor, and alpha is set to the rank, so that every program computes a scale of 1:
    lycoris-lora 4.1.3 applies the scale of a LoKr or LoHa twice when it merges, and programs disagree about the rank of
    full matrices.
    """
    exported_tensors: Tensors = {}
    for key in layers:
        adapter: Any = module.get_submodule(f"{key}.{SUBMODULE_NAME}")
        for name, tensor in adapter.state_dict().items():
            if name == "alpha":
                tensor = torch.tensor(float(adapter.lora_dim))
            elif name in SCALED_TENSORS and adapter.scale != 1.0:
                tensor = tensor * adapter.scale
            exported_tensors[file_key(key, name)] = tensor.detach()
    return exported_tensors


def restore_constants(module: nn.Module, layers: Mapping[str, AdapterSize]) -> None:
    """Give adapters on a module without weights the value of `scalar`, a factor that is always 1 here."""
    for key in layers:
        adapter: Any = module.get_submodule(f"{key}.{SUBMODULE_NAME}")
        adapter.scalar = torch.ones((), dtype=torch.float32)


def file_key(layer: str, tensor: str) -> str:
    """The key of a layer's tensor in a file of lycoris-lora."""
    return f"{KEY_PREFIX}{layer.replace('.', '_')}.{tensor}"


def full_matrix_note(module: nn.Module, layers: Mapping[str, AdapterSize]) -> str | None:
    """A note for the user if LoKr uses full matrices on some layers, because the rank is large; None otherwise."""
    full = [key for key in layers if getattr(module.get_submodule(f"{key}.{SUBMODULE_NAME}"), "use_w2", False)]
    if not full:
        return None
    return (
        f"LoKr's larger factor is a full matrix without a rank on {len(full)} of {len(layers)} layers ({full[0]} …), "
        "because the rank is at least half of its size or adapter.lokr_full_matrix is set"
    )


def _build_adapter(key: str, layer: nn.Module, settings: AdapterSettings, size: AdapterSize) -> Any:
    from lycoris.modules.full import FullModule
    from lycoris.modules.locon import LoConModule
    from lycoris.modules.loha import LohaModule
    from lycoris.modules.lokr import LokrModule

    name = KEY_PREFIX + key.replace(".", "_")
    if settings.type == "diff":
        return FullModule(name, layer)
    adapter_classes = {"locon": LoConModule, "loha": LohaModule, "lokr": LokrModule}
    options: dict[str, Any] = {"rs_lora": settings.rslora, "bypass_mode": _supports_bypass(layer)}
    if settings.type == "lokr":
        options |= {"factor": settings.lokr_factor, "full_matrix": settings.lokr_full_matrix}
    adapter = adapter_classes[settings.type](name, layer, lora_dim=size.rank, alpha=size.alpha, **options)
    if getattr(adapter, "use_w1", False) and adapter.use_w2:
        adapter.scale = 1.0  # full matrices have no rank, so no scale; with rs_lora lycoris-lora applies one
    if settings.dropout:
        # As a constructor argument, LoHa and LoKr would print that they do not support it, which is outdated.
        setattr(adapter, "dropout" if settings.type == "locon" else "drop", nn.Dropout(settings.dropout))
    return adapter


def _supports_bypass(layer: nn.Module) -> bool:
    """Whether the adapter's output can be added to the layer's; for grouped and dilated convolutions it cannot, and
    lycoris-lora changes the weight instead."""
    return getattr(layer, "groups", 1) == 1 and all(stride == 1 for stride in getattr(layer, "dilation", ()))


@contextmanager
def _quiet_logger() -> Iterator[None]:
    """Silences lycoris-lora's log on standard output. `full_matrix_note` reports what matters."""
    logger = logging.getLogger("LyCORIS")
    previous_level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(previous_level)
