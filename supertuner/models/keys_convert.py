"""From one scheme's file to another's as a plan: which bytes become which tensor. Pure; no tensor is touched here.

Names are not all that differs. What also has to be right, for the file to mean the same:

- kohya's readers multiply a LoRA by alpha / rank and look for `.alpha`; diffusers' and peft's take the matrices as they
  are. So alpha goes into lora_B on the way to them, and is written as a tensor on the way back.
- diffusers' own files may say an alpha in their metadata; it counts the same.
- DoRA's magnitudes have one number per output, as a row for peft and as a column for the others.
- a layer that the original fuses is split by rows: each part of the output has its own rows of lora_B and the same A.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from supertuner.core.errors import ModelError
from supertuner.models.keys import Name, Reading, write
from supertuner.models.keys_modules import members
from supertuner.models.keys_schemes import ALPHA, DORA, LORA_A, LORA_B, LORA_BIAS, Scheme

Shape: TypeAlias = tuple[int, ...]
DIFFUSERS_METADATA: Final = "lora_adapter_metadata"
"""Where diffusers notes alpha, rank and their exceptions, as JSON."""
OUTDATED: Final = (DIFFUSERS_METADATA, "modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash")
"""Metadata that is no longer true of a converted file."""
_MLP_RATIO: Final = 4
"""Of Flux: rows of `proj_mlp` per row of `to_q`, in the layer that holds both."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of the new file."""

    key: str
    shape: Shape
    source: str | None
    """Key in the old file; None: `value` is all it holds."""
    rows: tuple[int, int] | None = None
    """Those of the source; None: all."""
    scale: float = 1.0
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Layer:
    """The tensors of one layer: canonical tensor → key."""

    expert: str | None
    module: str
    keys: Mapping[str, str]

    @property
    def is_lora(self) -> bool:
        return LORA_A in self.keys and LORA_B in self.keys


def layers_of(reading: Reading) -> list[Layer]:
    """In the file's order."""
    found: dict[tuple[str | None, str], dict[str, str]] = {}
    for key, name in reading.names.items():
        found.setdefault((name.expert, name.module), {})[name.tensor] = key
    return [Layer(expert, module, keys) for (expert, module), keys in found.items()]


def planned(
    reading: Reading,
    shapes: Mapping[str, Shape],
    alphas: Mapping[str, float],
    metadata: Mapping[str, str],
    scheme: Scheme,
    family: str,
) -> list[Piece]:
    """The tensors of the file in `scheme`. `alphas`: key of an alpha → its value. ModelError for what cannot be said.

    Experts: a scheme without a word for them takes a file of one; of two it must be given one at a time.
    """
    experts = reading.experts
    if not scheme.marks_experts and len(experts) > 1:
        raise ModelError(f"{scheme.name} keys say no expert, and this file has {' and '.join(map(str, experts))}")
    found = []
    for layer in layers_of(reading):
        expert = layer.expert if scheme.marks_experts else None
        for module, part in _parts(layer, shapes, scheme):
            for piece, tensor in _pieces(layer, part, shapes, alphas, metadata, scheme):
                key = write(Name(expert, module, tensor), scheme, family)
                found.append(Piece(key, piece.shape, piece.source, piece.rows, piece.scale, piece.value))
    twice = len(found) - len({piece.key for piece in found})
    assert twice == 0, f"{twice} keys of {scheme.name} stand for two tensors"
    return found


def scale_of(
    layer: Layer, shapes: Mapping[str, Shape], alphas: Mapping[str, float], metadata: Mapping[str, str]
) -> float:
    """What a LoRA's product is multiplied with."""
    assert layer.is_lora, layer.module
    rank = shapes[layer.keys[LORA_A]][0]
    if ALPHA in layer.keys:
        return alphas[layer.keys[ALPHA]] / rank
    return _metadata_scale(layer.module, rank, metadata)


# ── one layer ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_Part: TypeAlias = tuple[int, int] | None
"""Rows of the output that are this layer's; None: all."""


def _parts(layer: Layer, shapes: Mapping[str, Shape], scheme: Scheme) -> Iterator[tuple[str, _Part]]:
    inside = members(layer.module)
    if len(inside) == 1 or scheme.naming == "original":
        yield layer.module, None
        return
    splittable = {LORA_A, LORA_B, LORA_BIAS, ALPHA, "diff", "diff_b"}
    if not splittable.issuperset(layer.keys):
        odd = sorted(set(layer.keys) - splittable)
        raise ModelError(
            f"{layer.module} is one layer here and {len(inside)} in diffusers; {', '.join(odd)} of it cannot be split"
        )
    outputs = next(shapes[layer.keys[one]][0] for one in (LORA_B, "diff", "diff_b", LORA_BIAS) if one in layer.keys)
    begin = 0
    for module, rows in zip(inside, _shares(outputs, len(inside)), strict=True):
        yield module, (begin, begin + rows)
        begin += rows


def _shares(outputs: int, count: int) -> Sequence[int]:
    """Queries, keys, values in equal parts; the fourth is the feed-forward's, so many times larger."""
    units = 3 + (_MLP_RATIO if count == 4 else 0)
    if outputs % units:
        raise ModelError(f"{outputs} rows are not {units} equal parts; the file is of no model that is known here")
    return [outputs // units] * 3 + ([_MLP_RATIO * outputs // units] if count == 4 else [])


def _pieces(
    layer: Layer,
    part: _Part,
    shapes: Mapping[str, Shape],
    alphas: Mapping[str, float],
    metadata: Mapping[str, str],
    scheme: Scheme,
) -> Iterator[tuple[Piece, str]]:
    scale = scale_of(layer, shapes, alphas, metadata) if layer.is_lora else 1.0
    for tensor, key in layer.keys.items():
        shape = shapes[key]
        if tensor == ALPHA and layer.is_lora:
            continue
        baked = scale if tensor in (LORA_B, LORA_BIAS) and not scheme.keeps_alpha else 1.0
        if tensor == DORA:
            shape = _magnitudes(layer, shape, shapes, scheme)
        if part is not None and tensor != LORA_A and tensor != ALPHA:
            yield Piece("", (part[1] - part[0], *shape[1:]), key, part, baked), tensor
        else:
            yield Piece("", shape, key, None, baked), tensor
    if layer.is_lora and scheme.keeps_alpha:
        yield Piece("", (), None, value=scale * shapes[layer.keys[LORA_A]][0]), ALPHA


def _magnitudes(layer: Layer, shape: Shape, shapes: Mapping[str, Shape], scheme: Scheme) -> Shape:
    """One number per output: a column, or for peft a row (a convolution's keeps its other dimensions)."""
    if not layer.is_lora:
        return shape  # LyCORIS' own, which no other program has a form for
    outputs, more = shapes[layer.keys[LORA_B]][0], len(shapes[layer.keys[LORA_B]]) - 2
    column, row = (outputs, *([1] * (more + 1))), (1, outputs, *([1] * more)) if more else (outputs,)
    if shape not in (column, row):
        raise ModelError(
            f"{layer.module}: DoRA's magnitudes {list(shape)} are not one per output ({outputs}); {scheme.name} files "
            "have no others"
        )
    return column if scheme.keeps_alpha else row


def _metadata_scale(module: str, rank: int, metadata: Mapping[str, str]) -> float:
    text = metadata.get(DIFFUSERS_METADATA)
    if text is None:
        return 1.0
    try:
        said = json.loads(text)
    except ValueError as error:
        raise ModelError(
            f"its metadata {DIFFUSERS_METADATA} is not JSON ({error}); what its alpha is cannot be known"
        ) from error
    if not isinstance(said, dict):
        raise ModelError(f"its metadata {DIFFUSERS_METADATA} is not an object; what its alpha is cannot be known")
    facts = {
        key.split(".", 1)[1] if key.startswith(("transformer.", "transformer_2.", "unet.")) else key: value
        for key, value in said.items()
    }
    alpha = _pattern(facts.get("alpha_pattern"), module, facts.get("lora_alpha", rank))
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ModelError(f"its metadata says an alpha of {alpha!r} for {module}, which is no number")
    return alpha / (math.sqrt(rank) if facts.get("use_rslora") is True else rank)


def _pattern(patterns: object, module: str, otherwise: object) -> object:
    """As peft looks it up: the name itself, or an ending of it."""
    for one, value in patterns.items() if isinstance(patterns, dict) else ():
        if isinstance(one, str) and re.search(rf"(^|\.){re.escape(one)}$", module):
            return value
    return otherwise
