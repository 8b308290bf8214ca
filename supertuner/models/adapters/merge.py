"""Merges an adapter into a weight: LoRA, LoHa, LoKr, DoRA and plain differences here, rarer types by lycoris-lora.

Computed in fp32 and returned in the weight's dtype. `strength` 1 is the adapter as trained, 0 leaves the weight as it
is. LoRA, LoHa and LoKr are implemented here because lycoris-lora 4.1.3 applies the scale alpha / rank of a LoHa twice
when it merges, and rejects a LoKr whose rank is larger than it would choose itself. For a weight W and scale s:

    LoRA   W + s · B A                                     B = lora_up, A = lora_down (arXiv 2106.09685, section 4.1)
    LoHa   W + s · (w1_a w1_b) ⊙ (w2_a w2_b)               ⊙ is the elementwise product (LyCORIS, arXiv 2309.14859)
    LoKr   W + s · w1 ⊗ w2                                 ⊗ is the Kronecker product; each factor may be a product a·b
    DoRA   m · (W + ΔW) / ‖W + ΔW‖                         norms and magnitudes m per output (arXiv 2402.09353, eq. 5)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from supertuner.core.errors import ModelError

Tensors = Mapping[str, torch.Tensor]
WEIGHT_DIFFS = ("diff", "w_norm")
BIAS_DIFFS = ("diff_b", "b_norm")
LORA_TENSORS = ("lora_up.weight", "lora_down.weight", "dora_scale")
LOHA_TENSORS = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "dora_scale")
LOKR_TENSORS = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "dora_scale")
LORA_BIAS = "lora_up.bias"
"""The bias of peft's `lora_bias`, which has the scale of the LoRA."""


def merged_weight(weight: torch.Tensor, tensors: Tensors, layer: str, strength: float = 1.0) -> torch.Tensor:
    """The weight with the adapter merged. `tensors` are the layer's, with the names of kohya and LyCORIS.

    Raises ModelError if they do not fit the weight or cannot be merged completely.
    """
    if weight.numel() == 0:
        return weight
    weight_fp32 = weight.float()
    if diff_name := next((name for name in WEIGHT_DIFFS if name in tensors), None):
        _require_all_used(tensors, [diff_name], layer)
        _require_shape(tensors[diff_name], weight, layer)
        return (weight_fp32 + strength * tensors[diff_name].float()).to(weight.dtype)
    if all(name in (*BIAS_DIFFS, LORA_BIAS, "alpha") for name in tensors):
        return weight
    delta = _weight_delta(tensors, layer)
    if delta is None:
        return _merge_with_lycoris(weight_fp32, tensors, layer, strength).to(weight.dtype)
    if delta.dim() < 2 or delta.numel() != weight.numel() or delta.shape[0] != weight.shape[0]:
        raise ModelError(f"{layer}: an adapter of {list(delta.shape)} does not fit a weight of {list(weight.shape)}")
    merged = weight_fp32 + delta.reshape(weight.shape)
    if "dora_scale" in tensors:
        merged = _apply_dora_magnitudes(merged, tensors["dora_scale"].float(), layer)
    return (weight_fp32 + strength * (merged - weight_fp32)).to(weight.dtype)


def merged_bias(bias: torch.Tensor, tensors: Tensors, layer: str, strength: float = 1.0) -> torch.Tensor:
    """The bias with the adapter merged. Raises ModelError if the shapes differ."""
    diffs = [tensors[name].float() for name in BIAS_DIFFS if name in tensors]
    if LORA_BIAS in tensors:
        diffs.append(tensors[LORA_BIAS].float() * _lora_scale(tensors, layer))
    if not diffs:
        return bias
    for diff in diffs:
        _require_shape(diff, bias, layer, "bias")
    return (bias.float() + strength * sum(diffs)).to(bias.dtype)


def comfyui_magnitude_factors(weight: torch.Tensor, tensors: Tensors, layer: str) -> torch.Tensor:
    """What DoRA's magnitudes, one per output, must be multiplied by so that ComfyUI computes the trained weight.

    ComfyUI (comfy/weight_adapter/base.py, `weight_decompose`) divides by the norm of the base weight, with ε added,
    instead of the norm of the changed weight: the factors are (‖W‖ + ε) / ‖W + ΔW‖. `tensors` as in `merged_weight`.
    """
    delta = _weight_delta(tensors, layer)
    if delta is None:
        raise ModelError(f"{layer}: its DoRA is of a type ({', '.join(tensors)}) that cannot be corrected for ComfyUI")
    base = weight.float().flatten(1)
    _require_shape(delta := delta.flatten(1), base, layer)
    factors: torch.Tensor = (base.norm(dim=1) + torch.finfo(torch.float32).eps) / (base + delta).norm(dim=1)
    return factors


def _require_shape(diff: torch.Tensor, parameter: torch.Tensor, layer: str, name: str = "weight") -> None:
    if diff.shape != parameter.shape:
        shapes = f"{list(diff.shape)}, but the {name} {list(parameter.shape)}"
        raise ModelError(f"{layer}: the adapter's diff has shape {shapes}")


def changes_bias(names: Iterable[str]) -> bool:
    """Whether these tensors of an adapter change the bias of their layer."""
    return not {*BIAS_DIFFS, LORA_BIAS}.isdisjoint(names)


def _lora_scale(tensors: Tensors, layer: str) -> float:
    if "lora_down.weight" not in tensors or "dora_scale" in tensors:
        raise ModelError(f"{layer}: {LORA_BIAS} needs a plain LoRA, but the layer has {', '.join(tensors)}")
    down = tensors["lora_down.weight"]
    return _scale(tensors, down.shape[0] if down.dim() else 0, layer)


def _scale(tensors: Tensors, rank: int | None, layer: str) -> float:
    """alpha / rank; 1 for full matrices, which have no rank (`rank` is None), and without an alpha."""
    if rank is None or "alpha" not in tensors:
        return 1.0
    if rank == 0 or tensors["alpha"].numel() != 1:
        shape = list(tensors["alpha"].shape)
        raise ModelError(f"{layer}: a rank of {rank} and an alpha of shape {shape} give no scale")
    return float(tensors["alpha"]) / rank


def _require_all_used(tensors: Tensors, used: Sequence[str], layer: str) -> None:
    """Raise ModelError for tensors that the merge would ignore."""
    unused = [name for name in tensors if name not in (*used, *BIAS_DIFFS, LORA_BIAS, "alpha")]
    if unused:
        used_names = [name for name in tensors if name not in unused]
        raise ModelError(f"{layer}: cannot merge {', '.join(unused)} together with {', '.join(used_names)}")


def _weight_delta(tensors: Tensors, layer: str) -> torch.Tensor | None:
    """ΔW, the difference to add to the weight; None for an adapter type that is not implemented here."""
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    used: Sequence[str]
    rank: int | None = None
    try:
        if "lora_up.weight" in tensors and "lora_mid.weight" not in tensors:
            used, rank = LORA_TENSORS, tensors["lora_down.weight"].shape[0]
            delta = tensors["lora_up.weight"].flatten(1) @ tensors["lora_down.weight"].flatten(1)
        elif "hada_w1_a" in tensors and "hada_t1" not in tensors:
            used, rank = LOHA_TENSORS, tensors["hada_w1_b"].shape[0]
            delta = (tensors["hada_w1_a"] @ tensors["hada_w1_b"]) * (tensors["hada_w2_a"] @ tensors["hada_w2_b"])
        elif {"lokr_w1", "lokr_w1_a"} & tensors.keys() and not {"lokr_t1", "lokr_t2"} & tensors.keys():
            used = LOKR_TENSORS
            w1, w2 = _kronecker_factor(tensors, "lokr_w1"), _kronecker_factor(tensors, "lokr_w2")
            rank = next((tensors[name].shape[0] for name in ("lokr_w2_b", "lokr_w1_b") if name in tensors), None)
            delta = torch.kron(w1.reshape([*w1.shape[:2], *([1] * (w2.dim() - 2))]), w2)
        else:
            return None
    except (RuntimeError, KeyError, IndexError, ValueError) as error:
        reason = f"it has no {error.args[0]}" if isinstance(error, KeyError) else error
        raise ModelError(f"{layer}: the adapter's tensors do not fit together: {reason}") from error
    _require_all_used(tensors, used, layer)
    return delta * _scale(tensors, rank, layer)


def _kronecker_factor(tensors: Tensors, name: str) -> torch.Tensor:
    """A factor of a LoKr: stored as a full matrix, or as a product of two matrices (`_a`, `_b`)."""
    if name in tensors:
        return tensors[name]
    left, right = tensors[f"{name}_a"], tensors[f"{name}_b"]
    return (left @ right.flatten(1)).reshape([left.shape[0], *right.shape[1:]])


def _apply_dora_magnitudes(merged: torch.Tensor, magnitudes: torch.Tensor, layer: str) -> torch.Tensor:
    """DoRA (Liu et al., arXiv 2402.09353, eq. 5): normalize each output's weights and multiply by its magnitude."""
    if magnitudes.dim() > 0 and magnitudes.shape[0] == magnitudes.numel() == merged.shape[0]:
        dim, lengths = 0, merged.flatten(1).norm(dim=1)
    elif magnitudes.shape[:2] == (1, merged.shape[1]) and magnitudes.numel() == merged.shape[1]:
        # Older versions of LyCORIS have one magnitude per input.
        dim, lengths = 1, merged.transpose(0, 1).flatten(1).norm(dim=1)
    else:
        shapes = f"{list(magnitudes.shape)} do not fit a weight of {list(merged.shape)}"
        raise ModelError(f"{layer}: DoRA's magnitudes of shape {shapes}")
    factors = magnitudes.flatten() / lengths
    scaled: torch.Tensor = merged * factors.reshape([-1 if axis == dim else 1 for axis in range(merged.dim())])
    return scaled


def _merge_with_lycoris(weight: torch.Tensor, tensors: Tensors, layer: str, strength: float) -> torch.Tensor:
    from lycoris.modules import get_module, make_module

    named = {f"layer.{name}": tensor.float() for name, tensor in tensors.items()}
    module_class, parts = get_module(named, "layer")
    if module_class is None:
        raise ModelError(f"{layer}: {', '.join(tensors)} belong to no adapter type that lycoris-lora knows")
    _require_all_used(tensors, module_class.weight_list, layer)
    try:
        lycoris_module = make_module(module_class, parts, "layer", _layer_with_weight(weight))
        merged = None if lycoris_module is None else lycoris_module.get_merged_weight(strength, weight.shape)[0]
    except Exception as error:  # lycoris-lora checks few sizes, so that unsuitable tensors can raise anything
        raise ModelError(f"{layer}: the adapter does not fit a weight of {list(weight.shape)}: {error}") from error
    if merged is None or merged.shape != weight.shape:
        raise ModelError(f"{layer}: lycoris-lora cannot merge its {', '.join(tensors)}")
    return torch.as_tensor(merged).detach()


def _layer_with_weight(weight: torch.Tensor) -> nn.Module:
    """A linear or convolution layer with this weight, as lycoris-lora needs it."""
    layer_classes: dict[int, Any] = {2: nn.Linear, 3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
    if weight.dim() not in layer_classes:
        raise ValueError(f"a weight with {weight.dim()} dimensions belongs to no linear or convolution layer")
    outputs, inputs, *kernel = weight.shape
    sizes = (inputs, outputs, tuple(kernel)) if kernel else (inputs, outputs)
    layer: nn.Module = layer_classes[weight.dim()](*sizes, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
