"""A weight with an adapter's change in it: LoRA, LoHa, LoKr, DoRA and plain differences; lycoris-lora does the rarer.

Computed in fp32 and given back in the weight's own dtype. `strength` 1 is the adapter as trained, 0 none of it.
The three products are written out here because lycoris-lora 4.1.3 multiplies a LoHa by alpha / rank twice when it
merges, and cannot take a LoKr whose rank is larger than it would have chosen itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from supertuner.core.errors import ModelError

Tensors = Mapping[str, torch.Tensor]
WEIGHT_ADDED = ("diff", "w_norm")
BIAS_ADDED = ("diff_b", "b_norm")
LORA = ("lora_up.weight", "lora_down.weight", "dora_scale")
LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "dora_scale")
LOKR = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "dora_scale")
LORA_BIAS = "lora_up.bias"
"""Of peft's `lora_bias`: scaled like the product of the two matrices beside it."""


def merged_weight(weight: torch.Tensor, tensors: Tensors, layer: str, strength: float = 1.0) -> torch.Tensor:
    """`tensors`: those of the layer, as kohya and LyCORIS call them. ModelError where they do not fit the weight."""
    if weight.numel() == 0:
        return weight
    added = [tensors[name] for name in WEIGHT_ADDED if name in tensors]
    exact = weight.float()
    if added:
        _check_all_count(tensors, WEIGHT_ADDED[:1] if "diff" in tensors else WEIGHT_ADDED[1:], layer)
        if added[0].shape != weight.shape:
            raise ModelError(f"{layer}: the change is {list(added[0].shape)}, the weight {list(weight.shape)}")
        return (exact + strength * added[0].float()).to(weight.dtype)
    if all(name in (*BIAS_ADDED, LORA_BIAS, "alpha") for name in tensors):
        return weight
    change = _change(tensors, layer)
    if change is None:
        return _by_lycoris(exact, tensors, layer, strength).to(weight.dtype)
    if change.dim() < 2 or change.numel() != weight.numel() or change.shape[0] != weight.shape[0]:
        raise ModelError(f"{layer}: the adapter does not fit: it is of {list(change.shape)}, not {list(weight.shape)}")
    whole = exact + change.reshape(weight.shape)
    if "dora_scale" in tensors:
        whole = _with_magnitudes(whole, tensors["dora_scale"].float(), layer)
    return (exact + strength * (whole - exact)).to(weight.dtype)


def merged_bias(bias: torch.Tensor, tensors: Tensors, layer: str, strength: float = 1.0) -> torch.Tensor:
    added = [tensors[name].float() for name in BIAS_ADDED if name in tensors]
    if LORA_BIAS in tensors:
        added.append(tensors[LORA_BIAS].float() * _lora_scale(tensors, layer))
    if not added:
        return bias
    for one in added:
        if one.shape != bias.shape:
            raise ModelError(f"{layer}: the change is {list(one.shape)}, the bias {list(bias.shape)}")
    return (bias.float() + strength * sum(added)).to(bias.dtype)


def changes_bias(names: Iterable[str]) -> bool:
    """Whether a layer needs a bias for these tensors of an adapter to be merged into it."""
    return not {*BIAS_ADDED, LORA_BIAS}.isdisjoint(names)


def _lora_scale(tensors: Tensors, layer: str) -> float:
    if "lora_down.weight" not in tensors or "dora_scale" in tensors:
        raise ModelError(f"{layer}: {LORA_BIAS} is of a plain LoRA, and its tensors are {', '.join(tensors)}")
    down = tensors["lora_down.weight"]
    return _scale(tensors, down.shape[0] if down.dim() else 0, layer)


def _scale(tensors: Tensors, rank: int | None, layer: str) -> float:
    """alpha / rank; whole matrices have no rank, and no scale."""
    if rank is None or "alpha" not in tensors:
        return 1.0
    if rank == 0 or tensors["alpha"].numel() != 1:
        raise ModelError(f"{layer}: a rank of {rank} and an alpha of {list(tensors['alpha'].shape)} are no scale")
    return float(tensors["alpha"]) / rank


def _check_all_count(tensors: Tensors, own: Sequence[str], layer: str) -> None:
    """ModelError for tensors that would be passed over."""
    over = [name for name in tensors if name not in (*own, *BIAS_ADDED, LORA_BIAS, "alpha")]
    if over:
        kept = [name for name in tensors if name not in over]
        raise ModelError(f"{layer}: {', '.join(over)} beside {', '.join(kept)} cannot be merged")


def _change(tensors: Tensors, layer: str) -> torch.Tensor | None:
    """What is added to the weight; None for a kind that is not written out here."""
    given = {name: tensor.float() for name, tensor in tensors.items()}
    own: Sequence[str]
    rank: int | None = None
    try:
        if "lora_up.weight" in given and "lora_mid.weight" not in given:
            own, rank = LORA, given["lora_down.weight"].shape[0]
            change = given["lora_up.weight"].flatten(1) @ given["lora_down.weight"].flatten(1)
        elif "hada_w1_a" in given and "hada_t1" not in given:
            own, rank = LOHA, given["hada_w1_b"].shape[0]
            change = (given["hada_w1_a"] @ given["hada_w1_b"]) * (given["hada_w2_a"] @ given["hada_w2_b"])
        elif {"lokr_w1", "lokr_w1_a"} & given.keys() and not {"lokr_t1", "lokr_t2"} & given.keys():
            own, one, two = LOKR, _factor(given, "lokr_w1"), _factor(given, "lokr_w2")
            rank = next((given[name].shape[0] for name in ("lokr_w2_b", "lokr_w1_b") if name in given), None)
            change = torch.kron(one.reshape([*one.shape[:2], *([1] * (two.dim() - 2))]), two)
        else:
            return None
    except (RuntimeError, KeyError, IndexError, ValueError) as error:
        reason = f"it has no {error.args[0]}" if isinstance(error, KeyError) else error
        raise ModelError(f"{layer}: the adapter does not fit together: {reason}") from error
    _check_all_count(tensors, own, layer)
    return change * _scale(given, rank, layer)


def _factor(given: Tensors, name: str) -> torch.Tensor:
    if name in given:
        return given[name]
    left, right = given[f"{name}_a"], given[f"{name}_b"]
    return (left @ right.flatten(1)).reshape([left.shape[0], *right.shape[1:]])


def _with_magnitudes(whole: torch.Tensor, magnitudes: torch.Tensor, layer: str) -> torch.Tensor:
    """DoRA (Liu et al., arXiv 2402.09353, eq. 5): the direction of the whole, with a length of its own per output."""
    if magnitudes.dim() > 0 and magnitudes.shape[0] == magnitudes.numel() == whole.shape[0]:
        along, lengths = 0, whole.flatten(1).norm(dim=1)
    elif (
        magnitudes.shape[:2] == (1, whole.shape[1]) and magnitudes.numel() == whole.shape[1]
    ):  # older LyCORIS: per input
        along, lengths = 1, whole.transpose(0, 1).flatten(1).norm(dim=1)
    else:
        raise ModelError(f"{layer}: DoRA's magnitudes {list(magnitudes.shape)} do not fit {list(whole.shape)}")
    factors = magnitudes.flatten() / lengths
    scaled: torch.Tensor = whole * factors.reshape([-1 if place == along else 1 for place in range(whole.dim())])
    return scaled


def _by_lycoris(weight: torch.Tensor, tensors: Tensors, layer: str, strength: float) -> torch.Tensor:
    from lycoris.modules import get_module, make_module

    named = {f"layer.{name}": tensor.float() for name, tensor in tensors.items()}
    kind, parts = get_module(named, "layer")
    if kind is None:
        raise ModelError(f"{layer}: {', '.join(tensors)} are of no kind of adapter that lycoris-lora knows")
    _check_all_count(tensors, kind.weight_list, layer)
    try:
        made = make_module(kind, parts, "layer", _around(weight))
        found = None if made is None else made.get_merged_weight(strength, weight.shape)[0]
    except Exception as error:  # a stranger's tensors in a library that checks few of their sizes
        raise ModelError(f"{layer}: the adapter does not fit a weight of {list(weight.shape)}: {error}") from error
    if found is None or found.shape != weight.shape:
        raise ModelError(f"{layer}: lycoris-lora cannot merge its {', '.join(tensors)}")
    return torch.as_tensor(found).detach()


def _around(weight: torch.Tensor) -> nn.Module:
    """A layer with this weight, which is what lycoris-lora wants to see."""
    sizes = weight.shape
    with torch.device("meta"):
        made: nn.Module
        if len(sizes) == 2:
            made = nn.Linear(sizes[1], sizes[0], bias=False)
        else:
            kinds = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
            if len(sizes) not in kinds:
                raise ValueError(f"a weight of {len(sizes)} dimensions is of no linear or convolution layer")
            made = kinds[len(sizes)](sizes[1], sizes[0], tuple(sizes[2:]), bias=False)  # type: ignore[arg-type]
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made
