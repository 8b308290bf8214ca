"""Describes adapters, in files and in checkpoints: key scheme, experts, kinds, ranks, scales, norms and metadata.

The norm of a layer is that of the change its adapter makes to the weight. It is computed from the small factors alone:
the product is never formed, and only one layer is in memory at a time.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from supertuner.core.errors import ModelError
from supertuner.core.types import JSON
from supertuner.models.adapters.family_layers import FAMILY_LAYERS
from supertuner.models.adapters.keys import AdapterKeyReading, read_keys
from supertuner.models.adapters.keys_convert import AdapterLayer, Shape, adapter_layers, lora_scale
from supertuner.models.adapters.keys_schemes import ALPHA, DORA_SCALE, LORA_A, LORA_B
from supertuner.train.export.adapter_files import TRAINED_PART_PREFIXES, AdapterFile, iter_tensors, read_alphas

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
"""A tensor that only one kind of adapter has → that kind."""
LARGEST_NORMS_SHOWN: Final = 5
WEIGHT_SUFFIXES: Final = (".weight", ".bias", "scale_shift_table")


@dataclass(frozen=True, slots=True)
class AdapterInspection:
    """The description of an adapter file."""

    path: Path
    nbytes: int
    scheme: str
    """The key scheme."""
    families: tuple[str, ...]
    """The model families whose layers it has."""
    experts: tuple[str, ...]
    """The experts that it is for, by its keys, its metadata or its name; empty: not known."""
    keys: int
    matched: int
    """Keys that belong to a layer."""
    unknown: Mapping[str, str]
    """Key that belongs to no layer → the reason."""
    kinds: Mapping[str, int]
    """Kind → number of layers."""
    ranks: Mapping[int, int]
    """Rank → number of layers; layers without a rank are not counted."""
    scales: Mapping[float, int]
    """Scale of a LoRA's product (alpha / rank) → number of layers."""
    dtypes: Mapping[str, int]
    norms: Mapping[str, float]
    """Layer (`expert: layer` if there are several experts) → norm of the change, for layers where it is computable."""
    not_finite: tuple[str, ...]
    """Keys whose tensors contain NaN or infinite values."""
    comfyui: Mapping[str, bool]
    """Family → whether ComfyUI reads these key names."""
    base_model: str | None
    """The base model; None: not known."""
    metadata: Mapping[str, str]

    @property
    def norm(self) -> float | None:
        """The norm of all changes together; None if none is computable."""
        return math.sqrt(sum(norm * norm for norm in self.norms.values())) if self.norms else None

    def to_dict(self) -> dict[str, JSON]:
        """Everything as JSON values; of the norms, only the largest."""
        largest = sorted(self.norms.items(), key=lambda item: -item[1])[:LARGEST_NORMS_SHOWN]
        return {
            "file": str(self.path),
            "nbytes": self.nbytes,
            "scheme": self.scheme,
            "families": list(self.families),
            "experts": list(self.experts),
            "keys": self.keys,
            "matched": self.matched,
            "unknown": dict(self.unknown),
            "kinds": dict(self.kinds),
            "ranks": {str(rank): count for rank, count in sorted(self.ranks.items())},
            "scales": {f"{scale:g}": count for scale, count in sorted(self.scales.items())},
            "dtypes": dict(self.dtypes),
            "norm": self.norm,
            "largest": dict(largest),
            "not_finite": list(self.not_finite),
            "comfyui": dict(self.comfyui),
            "base_model": self.base_model,
            "metadata": {key: _parse_metadata_value(text) for key, text in sorted(self.metadata.items())},
        }


@dataclass(frozen=True, slots=True)
class CheckpointPartReport:
    """One trained part of a checkpoint."""

    part: str
    summary: str
    problems: tuple[str, ...]
    """Tensors that are not finite and keys that belong to no layer, each with the file's name."""


def inspect_adapter(file: AdapterFile) -> AdapterInspection:
    """Describe an adapter; its tensors are read one layer at a time."""
    alphas, shapes = read_alphas(file), file.shapes
    kinds: Counter[str] = Counter()
    ranks: Counter[int] = Counter()
    scales: Counter[float] = Counter()
    norms: dict[str, float] = {}
    not_finite: list[str] = []
    for layer in adapter_layers(file.reading):
        loaded = {file.reading.names[key].tensor: t for key, t in iter_tensors(file, list(layer.keys.values()))}
        not_finite += [layer.keys[name] for name, t in loaded.items() if not bool(t.double().isfinite().all())]
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
    reading = file.reading
    key_experts = tuple(expert for expert in reading.experts if expert is not None)
    return AdapterInspection(
        path=file.path,
        nbytes=file.path.stat().st_size,
        scheme=reading.scheme.name,
        families=tuple(reading.families),
        experts=key_experts or ((file.expert,) if file.expert else ()),
        keys=len(file.entries),
        matched=len(reading.names),
        unknown=dict(reading.unknown),
        kinds=dict(kinds),
        ranks=dict(ranks),
        scales=dict(scales),
        dtypes=dict(Counter(entry.dtype_code for entry in file.entries.values())),
        norms=norms,
        not_finite=tuple(not_finite),
        comfyui={
            family: FAMILY_LAYERS[family].comfyui_loads(reading.scheme, has_dora(reading))
            for family in reading.families
        },
        base_model=_base_model(file),
        metadata=file.metadata,
    )


def inspect_checkpoint(checkpoint: Path) -> list[CheckpointPartReport]:
    """A report on every trained part of a checkpoint whose checksums have already been verified."""
    from supertuner.train.checkpoint.load import CheckpointParts, read_manifest

    folder = checkpoint.resolve()
    parts = CheckpointParts(folder, read_manifest(folder))
    return [_inspect_part(checkpoint, part, parts[part]) for part in parts if part.startswith(TRAINED_PART_PREFIXES)]


def _inspect_part(checkpoint: Path, part: str, tensors: dict[str, Tensor]) -> CheckpointPartReport:
    file = f"{checkpoint / part}.safetensors"
    not_finite = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    problems = (
        [f"{file}: {len(not_finite)} of {len(tensors)} tensors are not finite ({', '.join(not_finite[:3])})"]
        if not_finite
        else []
    )
    try:
        reading = read_keys(tensors)
    except ModelError as error:
        if tensors and all(name.endswith(WEIGHT_SUFFIXES) for name in tensors):  # a full fine-tune, or full differences
            return CheckpointPartReport(part, f"{len(tensors)} weights", tuple(problems))
        return CheckpointPartReport(part, "not an adapter", (*problems, f"{file}: {error}"))
    if reading.unknown:
        problems.append(f"{file}: {reading.summary()}")
    layers = adapter_layers(reading)
    return CheckpointPartReport(
        part, f"{reading.summary()}, {len(layers)} layers of {' or '.join(reading.families)}", tuple(problems)
    )


def adapter_kind(layer: AdapterLayer) -> str:
    kind = next((kind for tensor, kind in KIND_BY_TENSOR.items() if tensor in layer.keys), "other")
    return f"{kind} with dora" if DORA_SCALE in layer.keys else kind


def has_dora(reading: AdapterKeyReading) -> bool:
    return any(name.tensor == DORA_SCALE for name in reading.names.values())


def _base_model(file: AdapterFile) -> str | None:
    """The base model, by SuperTuner's metadata, else by the conventions of modelspec and of kohya's trainers."""
    recorded = file.supertuner_metadata.get("base_model")
    if isinstance(recorded, str):
        return recorded
    known = ("modelspec.architecture", "ss_base_model_version", "ss_sd_model_name", "base_model")
    return next((file.metadata[key] for key in known if file.metadata.get(key)), None)


def _parse_metadata_value(text: str) -> JSON:
    """Decode a value that is JSON inside a string, as settings often are."""
    if not text.startswith(("{", "[")):
        return text
    try:
        parsed: JSON = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return parsed


def _rank(layer: AdapterLayer, shapes: Mapping[str, Shape]) -> int | None:
    for tensor in (LORA_A, "hada_w1_b", "lokr_w2_b", "lokr_w1_b"):
        if tensor in layer.keys and shapes[layer.keys[tensor]]:
            return shapes[layer.keys[tensor]][0]
    return None


def _lycoris_scale(layer: AdapterLayer, rank: int | None, alphas: Mapping[str, float]) -> float:
    """alpha / rank, as LyCORIS applies it too; 1 for a LoKr of two full matrices, which has no rank."""
    return alphas[layer.keys[ALPHA]] / rank if rank and ALPHA in layer.keys else 1.0


def _update_norm(layer: AdapterLayer, loaded: Mapping[str, Tensor]) -> float | None:
    if layer.is_lora and "lora_mid.weight" not in loaded:
        return _norm_of_product(loaded[LORA_B], loaded[LORA_A])
    if "diff" in loaded:
        return float(loaded["diff"].double().norm())
    if _is_loha(loaded):  # (A B)∘(C D) equals one product whose inner dimension runs over all pairs of columns
        left = loaded["hada_w1_a"].double()[:, :, None] * loaded["hada_w2_a"].double()[:, None, :]
        right = loaded["hada_w1_b"].double()[:, None, :] * loaded["hada_w2_b"].double()[None, :, :]
        return _norm_of_product(left.flatten(1), right.flatten(0, 1))
    # The norm of a Kronecker product is the product of the norms.
    if adapter_kind(layer).startswith("lokr") and "lokr_t2" not in loaded:
        first_norm, second_norm = (_lokr_factor_norm(loaded, name) for name in ("lokr_w1", "lokr_w2"))
        return first_norm * second_norm if first_norm is not None and second_norm is not None else None
    return None


def _is_loha(loaded: Mapping[str, Tensor]) -> bool:
    """Whether the tensors are the four matrices of a LoHa, with matching shapes."""
    matrices = [loaded.get(f"hada_w{number}_{side}") for side in "ab" for number in (1, 2)]
    shapes = [matrix.shape for matrix in matrices if matrix is not None and matrix.dim() == 2]
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
    """‖L R‖ from the small matrices LᵀL and R Rᵀ; None if the shapes do not match."""
    if left.dim() < 2 or right.dim() < 2:
        return None
    left, right = left.double().flatten(1), right.double().flatten(1)
    if left.shape[1] != right.shape[0]:
        return None
    return math.sqrt(max(0.0, float(((left.T @ left) * (right @ right.T)).sum())))
