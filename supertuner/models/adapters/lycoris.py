"""Adapters of LyCORIS (arXiv 2309.14859) by lycoris-lora: LoCon, LoHa, LoKr, and whole weights as a difference.

Its layers are put inside the layers they adapt, not into a network beside the model: then whatever moves, compiles,
shards or checkpoints a block takes them along. They are added to what a layer computes ("bypass") rather than to its
weight, because beside a weight in bf16 a small difference would be rounded away before it is used.
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
from supertuner.models.adapters.layers import AdapterSize
from supertuner.models.spec import Tensors

SUBMODULE_NAME = "lycoris"
"""The name of the adapter inside its layer; it is in no name of a parameter of ours."""
KEY_PREFIX = "lycoris_"
"""How lycoris-lora begins the names of layers in a file; dots become underscores."""
SCALED_TENSORS = ("lora_up.weight", "hada_w2_a", "lokr_w2", "lokr_w2_b")
"""The tensor of each kind that begins at zero: what its scale is multiplied into in a file."""


def inject(
    module: nn.Module, settings: AdapterSettings, layers: Mapping[str, AdapterSize], *, seed: int, name: str
) -> dict[str, nn.Parameter]:
    """Put adapters on the layers; their parameters, in fp32, by name. All other parameters stop learning.

    lycoris-lora draws first values from torch's global generator: it is seeded for each layer, and put back.
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
    return {
        key.replace(f".{SUBMODULE_NAME}.", "."): parameter
        for key, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def export_tensors(module: nn.Module, layers: Mapping[str, AdapterSize]) -> Tensors:
    """The tensors under lycoris-lora's own names, as its loader takes them.

    The scale is multiplied into a tensor that began at zero, and alpha is the rank: merging a LoKr or a LoHa,
    lycoris-lora 4.1.3 scales it twice, and other programs take other numbers for the rank of whole matrices.
    """
    exported_tensors: Tensors = {}
    for key in layers:
        adapter: Any = module.get_submodule(f"{key}.{SUBMODULE_NAME}")
        for name, tensor in adapter.state_dict().items():
            if name == "alpha":
                tensor = torch.tensor(float(adapter.lora_dim))
            elif name in SCALED_TENSORS and adapter.scale != 1.0:
                tensor = tensor * adapter.scale
            exported_tensors[f"{KEY_PREFIX}{key.replace('.', '_')}.{name}"] = (
                tensor.detach().to("cpu", copy=True).contiguous()
            )
    return exported_tensors


def full_matrix_note(module: nn.Module, layers: Mapping[str, AdapterSize]) -> str | None:
    """What the user should know: on how many layers the rank is so large that LoKr takes a whole matrix instead."""
    full_matrix_layers = [
        key for key in layers if getattr(module.get_submodule(f"{key}.{SUBMODULE_NAME}"), "use_w2", False)
    ]
    if not full_matrix_layers:
        return None
    return (
        f"LoKr's larger factor is a whole matrix, without a rank, on {len(full_matrix_layers)} of {len(layers)} layers "
        f"({full_matrix_layers[0]} …): the rank is at least half of its size, or adapter.lokr_full_matrix is set"
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
        adapter.scale = 1.0  # whole matrices have no rank to be scaled by; with rs_lora it forgets that
    if settings.dropout:  # given to its constructor, LoHa and LoKr print that they have none, which is no longer true
        setattr(adapter, "dropout" if settings.type == "locon" else "drop", nn.Dropout(settings.dropout))
    return adapter


def _supports_bypass(layer: nn.Module) -> bool:
    """Whether the adapter can be computed beside its layer: grouped and dilated convolutions are rebuilt instead."""
    return getattr(layer, "groups", 1) == 1 and all(step == 1 for step in getattr(layer, "dilation", ()))


@contextmanager
def _quiet_logger() -> Iterator[None]:
    """lycoris-lora writes remarks to standard output; what matters of them is told by `remark`."""
    logger = logging.getLogger("LyCORIS")
    previous_level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(previous_level)
