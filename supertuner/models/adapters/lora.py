"""Low-rank adapters by peft: LoRA (Hu et al., arXiv 2106.09685), DoRA (arXiv 2402.09353), rsLoRA (arXiv 2312.03732).

A new adapter does not change the module's output by a bit, and equal seeds give equal adapters.
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
from supertuner.models.adapters.layers import AdapterSize, trainable_parameters
from supertuner.models.spec import Tensors

ADAPTER_NAME = "default"
"""peft's name of the adapter inside the module. It does not occur in files or in our parameter names."""
MAGNITUDE_SUFFIX = ".lora_magnitude_vector.weight"


def inject(
    module: nn.Module, settings: AdapterSettings, layers: Mapping[str, AdapterSize], *, seed: int, name: str
) -> dict[str, nn.Parameter]:
    """Attach adapters to the layers and freeze all other parameters; return the adapters' parameters by name.

    Uses peft's injection instead of `add_adapter`, which some models of diffusers do not have.
    """
    from peft import LoraConfig, inject_adapter_in_model

    lora_config = LoraConfig(
        r=settings.rank,
        lora_alpha=1,  # unused: alpha_pattern has an entry for every layer
        lora_dropout=settings.dropout,
        target_modules=list(layers),
        rank_pattern={_anchored_pattern(key): size.rank for key, size in layers.items()},
        alpha_pattern={_anchored_pattern(key): size.alpha for key, size in layers.items()},
        use_rslora=settings.rslora,
        use_dora=settings.dora,
    )
    module.requires_grad_(False)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft warns for each layer that it cannot merge into quantized weights; nothing here merges.
        warnings.filterwarnings("ignore", message=".*get_apply_tensor_subclass.*")
        inject_adapter_in_model(lora_config, module, adapter_name=ADAPTER_NAME)
    parameters = trainable_parameters(module, ADAPTER_NAME)
    for key, parameter in parameters.items():
        parameter.data = _initial_value(key, parameter, seed, name).to(parameter.device)
    return parameters


def export_tensors(tensors: Mapping[str, torch.Tensor], layers: Mapping[str, AdapterSize], prefix: str) -> Tensors:
    """The tensors of a file for diffusers' `load_lora_weights`.

    The scale is multiplied into lora_B, so that the file means the same to programs that ignore metadata: without an
    alpha diffusers assumes that alpha is the rank, and in some families it rejects `.alpha` tensors.
    """
    exported_tensors = {}
    for name, tensor in tensors.items():
        layer = re.split(r"\.lora_(?:A|B|magnitude_vector)\.", name)[0]
        scale = layers[layer].scale if ".lora_B." in name else 1.0
        key = name.removesuffix(".weight") if name.endswith(MAGNITUDE_SUFFIX) else name  # peft writes this name
        exported_tensors[f"{prefix}.{key}"] = tensor if scale == 1.0 else tensor * scale
    return exported_tensors


def _anchored_pattern(key: str) -> str:
    """peft matches a pattern with the end of a name unless it is anchored."""
    return f"^{re.escape(key)}"


def _initial_value(key: str, parameter: nn.Parameter, seed: int, name: str) -> torch.Tensor:
    """As published (arXiv 2106.09685, section 4.1) and as in peft: A is random, B is zero; DoRA's magnitudes are the
    norms that peft computed from the weight."""
    if key.endswith(MAGNITUDE_SUFFIX):
        return parameter.detach().float()
    values = torch.zeros(parameter.shape, dtype=torch.float32)
    if ".lora_A." in key:
        generator = torch.Generator().manual_seed(xxhash.xxh32_intdigest(f"{seed}\0{name}\0{key}".encode()))
        nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    return values
