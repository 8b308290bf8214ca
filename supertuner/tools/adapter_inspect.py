"""What a file of an adapter is: scheme, experts, kinds, ranks, scales, norms, and what its metadata tells of it.

Norms are those of the change that a layer's adapter makes to the weight, by the small matrices alone: the product is
never formed, and no more than one layer is in memory.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from supertuner.models.adapters.keys import AdapterKeyReading
from supertuner.models.adapters.keys_convert import AdapterLayer, Shape, adapter_layers, lora_scale
from supertuner.models.adapters.keys_schemes import ALPHA, DORA_SCALE, LORA_A, LORA_B, comfyui_reads
from supertuner.train.export.adapter_files import AdapterFile, iter_tensors, read_alphas

if TYPE_CHECKING:
    from torch import Tensor

KIND_BY_TENSOR: Final = {
    LORA_A: "lora",
    "hada_w1_a": "loha",
    "lokr_w1": "lokr",
    "lokr_w1_a": "lokr",
    "diff": "diff",
    "w_norm": "norm",
    "oft_blocks": "oft",
    "a1.weight": "glora",
    "on_input": "ia3",
}
"""A tensor that only this kind of adapter has → the kind."""
LARGEST_NORMS_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class AdapterInspection:
    kinds: Mapping[str, int]
    """Kind → layers."""
    ranks: Mapping[int, int]
    """Rank → layers; those without one are in none."""
    scales: Mapping[float, int]
    """What a LoRA's product is multiplied with → layers."""
    dtypes: Mapping[str, int]
    norms: Mapping[str, float]
    """Layer (`expert: layer` where there are two) → norm of the change; where it can be told."""
    not_finite: tuple[str, ...]
    """Keys with infinities or values that are no numbers."""


def inspect_adapter(file: AdapterFile) -> AdapterInspection:
    alphas, shapes = read_alphas(file), file.shapes
    kinds: Counter[str] = Counter()
    ranks: Counter[int] = Counter()
    scales: Counter[float] = Counter()
    norms: dict[str, float] = {}
    not_finite: list[str] = []
    for layer in adapter_layers(file.reading):
        loaded = {file.reading.names[key].tensor: one for key, one in iter_tensors(file, list(layer.keys.values()))}
        not_finite += [layer.keys[name] for name, one in loaded.items() if not bool(one.double().isfinite().all())]
        kinds[adapter_kind(layer)] += 1
        rank = _rank(layer, shapes)
        if rank is not None:
            ranks[rank] += 1
        scale = (
            lora_scale(layer, shapes, alphas, file.metadata) if layer.is_lora else _lycoris_scale(layer, rank, alphas)
        )
        if layer.is_lora:
            scales[scale] += 1
        norm = _update_norm(layer, loaded)
        if norm is not None:
            norms[f"{layer.expert}: {layer.module}" if layer.expert else layer.module] = norm * scale
    dtypes = Counter(entry.dtype_code for entry in file.entries.values())
    return AdapterInspection(dict(kinds), dict(ranks), dict(scales), dict(dtypes), norms, tuple(not_finite))


def adapter_kind(layer: AdapterLayer) -> str:
    kind = next((kind for tensor, kind in KIND_BY_TENSOR.items() if tensor in layer.keys), "other")
    return f"{kind} with dora" if DORA_SCALE in layer.keys else kind


def has_dora(reading: AdapterKeyReading) -> bool:
    return any(name.tensor == DORA_SCALE for name in reading.names.values())


def inspection_record(file: AdapterFile, inspection: AdapterInspection) -> dict[str, object]:
    """All of it as plain data."""
    reading = file.reading
    largest = sorted(inspection.norms.items(), key=lambda one: -one[1])[:LARGEST_NORMS_SHOWN]
    return {
        "file": str(file.path),
        "nbytes": file.path.stat().st_size,
        "scheme": reading.scheme.name,
        "families": list(reading.families),
        "experts": [one for one in reading.experts if one is not None] or ([file.expert] if file.expert else []),
        "keys": len(file.entries),
        "matched": len(reading.names),
        "unknown": dict(reading.unknown),
        "kinds": dict(inspection.kinds),
        "ranks": {str(rank): count for rank, count in sorted(inspection.ranks.items())},
        "scales": {f"{scale:g}": count for scale, count in sorted(inspection.scales.items())},
        "dtypes": dict(inspection.dtypes),
        "norm": math.sqrt(sum(norm * norm for norm in inspection.norms.values())) if inspection.norms else None,
        "largest": dict(largest),
        "not_finite": list(inspection.not_finite),
        "comfyui": {one: comfyui_reads(one, reading.scheme, has_dora(reading)) for one in reading.families},
        "base_model": _base_model(file),
        "metadata": {key: _parse_metadata_value(text) for key, text in sorted(file.metadata.items())},
    }


def _base_model(file: AdapterFile) -> str | None:
    """By our metadata, the conventions of modelspec, and of kohya's trainers."""
    recorded = file.supertuner_metadata.get("base_model")
    if isinstance(recorded, str):
        return recorded
    known = ("modelspec.architecture", "ss_base_model_version", "ss_sd_model_name", "base_model")
    return next((file.metadata[key] for key in known if file.metadata.get(key)), None)


def _parse_metadata_value(text: str) -> object:
    """Settings are often JSON inside a text."""
    if not text.startswith(("{", "[")):
        return text
    try:
        parsed: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return parsed


def _rank(layer: AdapterLayer, shapes: Mapping[str, Shape]) -> int | None:
    for tensor in (LORA_A, "hada_w1_b", "lokr_w2_b", "lokr_w1_b"):
        if tensor in layer.keys and shapes[layer.keys[tensor]]:
            return shapes[layer.keys[tensor]][0]
    return None


def _lycoris_scale(layer: AdapterLayer, rank: int | None, alphas: Mapping[str, float]) -> float:
    """LyCORIS multiplies with alpha / rank too; a LoKr of two whole matrices has no rank, and no scale."""
    return alphas[layer.keys[ALPHA]] / rank if rank and ALPHA in layer.keys else 1.0


def _update_norm(layer: AdapterLayer, loaded: Mapping[str, Tensor]) -> float | None:
    if layer.is_lora and "lora_mid.weight" not in loaded:
        return _norm_of_product(loaded[LORA_B], loaded[LORA_A])
    if "diff" in loaded:
        return float(loaded["diff"].double().norm())
    if _is_loha(loaded):  # (a b)∘(c d) is one product of all pairs of columns
        left = loaded["hada_w1_a"].double()[:, :, None] * loaded["hada_w2_a"].double()[:, None, :]
        right = loaded["hada_w1_b"].double()[:, None, :] * loaded["hada_w2_b"].double()[None, :, :]
        return _norm_of_product(left.flatten(1), right.flatten(0, 1))
    if (
        adapter_kind(layer).startswith("lokr") and "lokr_t2" not in loaded
    ):  # of a Kronecker product: the product of the norms
        first_norm, second_norm = (_lokr_factor_norm(loaded, name) for name in ("lokr_w1", "lokr_w2"))
        return first_norm * second_norm if first_norm is not None and second_norm is not None else None
    return None


def _is_loha(loaded: Mapping[str, Tensor]) -> bool:
    """Four matrices that belong together."""
    matrices = [loaded.get(f"hada_w{one}_{side}") for side in "ab" for one in (1, 2)]
    shapes = [one.shape for one in matrices if one is not None and one.dim() == 2]
    if len(shapes) != 4 or "hada_t1" in loaded:
        return False
    return shapes[0][0] == shapes[1][0] and shapes[2][1] == shapes[3][1]


def _lokr_factor_norm(loaded: Mapping[str, Tensor], name: str) -> float | None:
    if name in loaded:
        return float(loaded[name].double().norm())
    if f"{name}_a" in loaded and f"{name}_b" in loaded:
        return _norm_of_product(loaded[f"{name}_a"], loaded[f"{name}_b"])
    return None


def _norm_of_product(left: Tensor, right: Tensor) -> float | None:
    """‖L R‖ by the small matrices LᵀL and R Rᵀ. None where the two do not belong together."""
    if left.dim() < 2 or right.dim() < 2:
        return None
    left, right = left.double().flatten(1), right.double().flatten(1)
    if left.shape[1] != right.shape[0]:
        return None
    return math.sqrt(max(0.0, float(((left.T @ left) * (right @ right.T)).sum())))
