"""Low-rank adapters by peft: LoRA (Hu et al., arXiv 2106.09685), DoRA (arXiv 2402.09353), rsLoRA (arXiv 2312.03732).

A new adapter changes nothing of what the module computes, to the bit, and the same seed gives the same adapter.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping

import torch
import xxhash
from torch import nn

from supertuner.config.settings.model import AdapterSettings
from supertuner.models.adapters.layers import AdapterSize
from supertuner.models.spec import Tensors

ADAPTER_NAME = "default"
"""peft's name of the adapter inside the module; it is in no file and in no name of ours."""
MAGNITUDE_SUFFIX = ".lora_magnitude_vector.weight"


def inject(
    module: nn.Module, settings: AdapterSettings, layers: Mapping[str, AdapterSize], *, seed: int, name: str
) -> dict[str, nn.Parameter]:
    """Put adapters on the layers; their parameters by name. All other parameters stop learning.

    peft's injection rather than a model's own add_adapter, which some models of diffusers do not have.
    """
    from peft import LoraConfig, inject_adapter_in_model

    lora_config = LoraConfig(
        r=settings.rank,
        lora_alpha=1,  # never meant: every layer has an entry of its own
        lora_dropout=settings.dropout,
        target_modules=list(layers),
        rank_pattern={_anchored_pattern(key): size.rank for key, size in layers.items()},
        alpha_pattern={_anchored_pattern(key): size.alpha for key, size in layers.items()},
        use_rslora=settings.rslora,
        use_dora=settings.dora,
    )
    module.requires_grad_(False)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft cannot merge into 8-bit weights, and says so for each layer; we never merge.
        warnings.filterwarnings("ignore", message=".*get_apply_tensor_subclass.*")
        inject_adapter_in_model(lora_config, module, adapter_name=ADAPTER_NAME)
    parameters = {
        key.replace(f".{ADAPTER_NAME}.", "."): parameter
        for key, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    for key, parameter in parameters.items():
        parameter.data = _initial_value(key, parameter, seed, name).to(parameter.device)
    return parameters


def export_tensors(tensors: Mapping[str, torch.Tensor], layers: Mapping[str, AdapterSize], prefix: str) -> Tensors:
    """The tensors as diffusers' `load_lora_weights` takes them.

    The scale is multiplied into lora_B, so that the file means the same to programs that read no metadata: diffusers
    takes alpha for the rank where it finds no other, and refuses `.alpha` tensors in some families.
    """
    exported_tensors = {}
    for name, tensor in tensors.items():
        layer = re.split(r"\.lora_(?:A|B|magnitude_vector)\.", name)[0]
        scale = layers[layer].scale if ".lora_B." in name else 1.0
        key = name.removesuffix(".weight") if name.endswith(MAGNITUDE_SUFFIX) else name  # as peft writes it
        exported_tensors[f"{prefix}.{key}"] = tensor if scale == 1.0 else tensor * scale
    return exported_tensors


def _anchored_pattern(key: str) -> str:
    """peft reads a pattern as the end of a name unless it is anchored."""
    return f"^{re.escape(key)}"


def _initial_value(key: str, parameter: nn.Parameter, seed: int, name: str) -> torch.Tensor:
    """As published (arXiv 2106.09685, section 4.1) and as peft does it: A at random, B zero; DoRA's lengths are those
    of the weight's own rows, as peft found them."""
    if key.endswith(MAGNITUDE_SUFFIX):
        return parameter.detach().float()
    values = torch.zeros(parameter.shape, dtype=torch.float32)
    if ".lora_A." in key:
        generator = torch.Generator().manual_seed(xxhash.xxh32_intdigest(f"{seed}\0{name}\0{key}".encode()))
        nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    return values
