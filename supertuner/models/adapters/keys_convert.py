"""Plans the conversion of an adapter file from one scheme to another: which tensor is built from which. Pure.

Schemes differ in more than names. For the converted file to mean the same:

- Readers of kohya's format multiply a LoRA by alpha / rank and expect an `.alpha` tensor; those of diffusers and peft
  use the matrices as they are. So the scale is multiplied into lora_B in one direction, and in the other lora_B keeps
  its values and an alpha of scale · rank is written.
- Files of diffusers may hold alpha in their metadata; it has the same effect.
- DoRA's magnitudes are one number per output: a row vector in peft, a column in other formats.
- A layer that is fused in the original code (queries, keys and values in one matrix W = [Wq; Wk; Wv]) is split by
  rows. Its LoRA B·A becomes one LoRA per part: the part's rows of B, and the same A. In the other direction the parts'
  LoRAs become one LoRA of the sum of their ranks, with A stacked and B block-diagonal:

      [Bq 0  0 ]   [Aq]     [Bq·Aq]
      [0  Bk 0 ] · [Ak]  =  [Bk·Ak]        exact; a part that the file lacks has rows of zeros
      [0  0  Bv]   [Av]     [Bv·Av]
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias

from supertuner.config.families import later_experts
from supertuner.core.errors import ModelError
from supertuner.models.adapters.keys import AdapterKeyReading, AdapterTensorName, format_key, fused_layer
from supertuner.models.adapters.keys_modules import fused_members
from supertuner.models.adapters.keys_schemes import ALPHA, DORA_SCALE, LORA_A, LORA_B, LORA_BIAS, KeyScheme

Shape: TypeAlias = tuple[int, ...]
DIFFUSERS_METADATA: Final = "lora_adapter_metadata"
"""The metadata entry in which diffusers stores alpha, rank and their per-layer patterns, as JSON."""
OUTDATED_METADATA: Final = (DIFFUSERS_METADATA, "modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash")
"""Metadata that is wrong for a converted file."""
_MLP_RATIO: Final = 4
"""Flux: rows of `proj_mlp` per row of `to_q`, in the fused layer of both."""
_PLAIN_PATTERN: Final = re.compile(r"\^?(?:[A-Za-z0-9_.]|\\[._-]|-|\.\*|\\d\+|\[0-9\]\+)+\$?")
_MAX_REPEATS: Final = 3
"""The largest number of repetitions in a pattern: a malicious file must not cause endless backtracking."""


class TensorBlock(NamedTuple):
    """A tensor of the old file that is placed at (row, column) in a tensor of the new one, which is zero elsewhere."""

    source: str
    row: int
    column: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """One tensor of the new file."""

    key: str
    shape: Shape
    source: str | None
    """Key in the old file; None: the tensor consists of `blocks`, or is filled with `fill_value`."""
    rows: tuple[int, int] | None = None
    """The rows of the source, from first to last + 1; None: all."""
    scale: float = 1.0
    fill_value: float = 0.0
    blocks: tuple[TensorBlock, ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterLayer:
    """The tensors of one layer of one expert."""

    expert: str | None
    module: str
    keys: Mapping[str, str]
    """Canonical tensor → key in the file."""

    @property
    def is_lora(self) -> bool:
        return LORA_A in self.keys and LORA_B in self.keys


def adapter_layers(reading: AdapterKeyReading) -> list[AdapterLayer]:
    """The layers of a file, in its order."""
    keys_by_layer: dict[tuple[str | None, str], dict[str, str]] = {}
    for key, name in reading.names.items():
        keys_by_layer.setdefault((name.expert, name.module), {})[name.tensor] = key
    return [AdapterLayer(expert, module, keys) for (expert, module), keys in keys_by_layer.items()]


def plan_conversion(
    reading: AdapterKeyReading,
    shapes: Mapping[str, Shape],
    alphas: Mapping[str, float],
    metadata: Mapping[str, str],
    scheme: KeyScheme,
    family: str,
) -> list[ConvertedTensor]:
    """The tensors of the converted file. `alphas`: key of an alpha tensor → its value.

    Raises ModelError if the scheme cannot express the adapter. A scheme that does not name experts holds one expert per
    file, so a reading with several must be converted one expert at a time.
    """
    experts = reading.experts
    if not scheme.marks_experts and len(experts) > 1:
        names = " and ".join(map(str, experts))
        raise ModelError(f"{scheme.name} keys cannot name an expert, but this file has {names}")
    converted: list[ConvertedTensor] = []

    def add(pieces: Iterable[tuple[ConvertedTensor, str]], expert: str | None, module: str) -> None:
        for piece, tensor in pieces:
            key = format_key(AdapterTensorName(expert, module, tensor), scheme, family)
            converted.append(replace(piece, key=key))

    fused: dict[tuple[str | None, str], list[tuple[AdapterLayer, float]]] = {}
    for layer in adapter_layers(reading):
        _check_pair(layer)
        expert = layer.expert if scheme.marks_experts else None
        scale = lora_scale(layer, shapes, alphas, metadata) if layer.is_lora else 1.0
        may_fuse = scheme.naming == "original" and "(" not in layer.module
        if may_fuse and (fused_module := fused_layer(layer.module, family)) is not None:
            fused.setdefault((expert, fused_module), []).append((layer, scale))
            continue
        for module, rows in _split_layer(layer, shapes, scheme):
            add(_convert_layer(layer, rows, scale, shapes, scheme), expert, module)
    for (expert, fused_module), scaled_layers in fused.items():
        add(_fuse_layers(fused_module, scaled_layers, shapes, scheme), expert, fused_module)
    duplicates = len(converted) - len({piece.key for piece in converted})
    assert duplicates == 0, f"{duplicates} keys of {scheme.name} would name two tensors"
    return converted


def _check_pair(layer: AdapterLayer) -> None:
    """Raise ModelError for half a LoRA, which some programs ignore and others fail on."""
    halves = [tensor for tensor in (LORA_A, LORA_B) if tensor in layer.keys]
    if len(halves) == 1:
        other = LORA_B if halves == [LORA_A] else LORA_A
        key = layer.keys[halves[0]]
        raise ModelError(f"{layer.module} has {halves[0]} ({key}) but no {other}; the file is incomplete or damaged")


def lora_scale(
    layer: AdapterLayer, shapes: Mapping[str, Shape], alphas: Mapping[str, float], metadata: Mapping[str, str]
) -> float:
    """The factor on a LoRA's product: alpha / rank, from the alpha tensor or the metadata."""
    rank = _lora_rank(layer, shapes)
    if ALPHA in layer.keys:
        return alphas[layer.keys[ALPHA]] / rank
    return _metadata_scale(layer, rank, metadata)


def _lora_rank(layer: AdapterLayer, shapes: Mapping[str, Shape]) -> int:
    """The rank of a LoRA. Raises ModelError if its two matrices do not fit together."""
    shape_a, shape_b = shapes[layer.keys[LORA_A]], shapes[layer.keys[LORA_B]]
    if len(shape_a) < 2 or len(shape_b) != len(shape_a) or shape_a[0] == 0 or shape_b[1] != shape_a[0]:
        raise ModelError(f"{layer.module}: matrices of shapes {list(shape_a)} and {list(shape_b)} are not a LoRA")
    return shape_a[0]


# ── one layer ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_Rows: TypeAlias = tuple[int, int] | None
"""The rows of a fused layer's output that belong to one part; None: all."""


def _split_layer(layer: AdapterLayer, shapes: Mapping[str, Shape], scheme: KeyScheme) -> Iterator[tuple[str, _Rows]]:
    """The layers that a layer becomes in the scheme: (name, rows). Only a fused layer becomes several."""
    member_names = fused_members(layer.module)
    if len(member_names) == 1 or scheme.naming == "original":
        yield layer.module, None
        return
    splittable = {LORA_A, LORA_B, LORA_BIAS, ALPHA, "diff", "diff_b"}
    if unsupported := ", ".join(sorted(set(layer.keys) - splittable)):
        layers = f"one layer here and {len(member_names)} in diffusers"
        raise ModelError(f"{layer.module} is {layers}; {unsupported} cannot be split")
    if layer.is_lora:
        _lora_rank(layer, shapes)
    sizes = {shapes[layer.keys[one]][:1] for one in (LORA_B, "diff", "diff_b", LORA_BIAS) if one in layer.keys}
    if len(sizes) != 1 or sizes == {()}:
        raise ModelError(f"{layer.module} is {len(member_names)} layers in diffusers, but its tensors differ in size")
    outputs = sizes.pop()[0]
    first_row = 0
    for module, rows in zip(member_names, _member_rows(outputs, len(member_names)), strict=True):
        yield module, (first_row, first_row + rows)
        first_row += rows


def _member_rows(outputs: int, count: int) -> Sequence[int]:
    """The rows of each part: equal for queries, keys and values; a fourth, the feed-forward, has 4 times as many."""
    units = 3 + (_MLP_RATIO if count == 4 else 0)
    if outputs % units:
        raise ModelError(f"{outputs} rows are not {units} equal parts; the file belongs to an unknown model")
    return [outputs // units] * 3 + ([_MLP_RATIO * outputs // units] if count == 4 else [])


def _fuse_layers(
    fused_module: str, parts: Sequence[tuple[AdapterLayer, float]], shapes: Mapping[str, Shape], scheme: KeyScheme
) -> Iterator[tuple[ConvertedTensor, str]]:
    """One LoRA of a fused layer from the LoRAs of its parts: stacked A, block-diagonal B (see above).

    The scale of each part is multiplied into its block of B, so the fused LoRA has the scale 1: alpha is the rank.
    """
    one_layer = f"{fused_module} is one layer in {scheme.name} keys"
    unsupported = {tensor for layer, _ in parts for tensor in layer.keys} - {LORA_A, LORA_B, ALPHA}
    if unsupported or not all(layer.is_lora for layer, _ in parts):
        raise ModelError(f"{one_layer}; only plain LoRAs of its parts can be fused")
    member_names = fused_members(fused_module)
    first = parts[0][0]
    rows_per_unit = shapes[first.keys[LORA_B]][0] // (_MLP_RATIO if member_names.index(first.module) == 3 else 1)
    outputs = [rows_per_unit] * 3 + ([_MLP_RATIO * rows_per_unit] if len(member_names) == 4 else [])
    ranks, lora_a_blocks, lora_b_blocks = 0, [], []
    for layer, scale in parts:
        member_index = member_names.index(layer.module)
        rank, inputs = _lora_rank(layer, shapes), shapes[first.keys[LORA_A]][1:]
        if shapes[layer.keys[LORA_B]] != (outputs[member_index], rank) or shapes[layer.keys[LORA_A]] != (rank, *inputs):
            raise ModelError(f"{one_layer}, but the shapes of its parts do not fit together")
        lora_a_blocks.append(TensorBlock(layer.keys[LORA_A], ranks, 0))
        lora_b_blocks.append(TensorBlock(layer.keys[LORA_B], sum(outputs[:member_index]), ranks, scale))
        ranks += rank
    yield ConvertedTensor("", (ranks, shapes[first.keys[LORA_A]][1]), None, blocks=tuple(lora_a_blocks)), LORA_A
    yield ConvertedTensor("", (sum(outputs), ranks), None, blocks=tuple(lora_b_blocks)), LORA_B
    if scheme.stores_alpha:
        yield ConvertedTensor("", (), None, fill_value=float(ranks)), ALPHA


def _convert_layer(
    layer: AdapterLayer, rows: _Rows, scale: float, shapes: Mapping[str, Shape], scheme: KeyScheme
) -> Iterator[tuple[ConvertedTensor, str]]:
    """The tensors of a layer, or of some rows of it, with their canonical names."""
    for tensor, key in layer.keys.items():
        shape = shapes[key]
        if tensor == ALPHA and layer.is_lora:
            continue  # replaced below, or multiplied into lora_B
        baked_scale = scale if tensor in (LORA_B, LORA_BIAS) and not scheme.stores_alpha else 1.0
        if tensor == DORA_SCALE:
            shape = _magnitude_shape(layer, shape, shapes, scheme)
        if rows is not None and tensor != LORA_A and tensor != ALPHA:  # all parts share A
            yield ConvertedTensor("", (rows[1] - rows[0], *shape[1:]), key, rows, baked_scale), tensor
        else:
            yield ConvertedTensor("", shape, key, None, baked_scale), tensor
    if layer.is_lora and scheme.stores_alpha:
        yield ConvertedTensor("", (), None, fill_value=scale * shapes[layer.keys[LORA_A]][0]), ALPHA


def _magnitude_shape(layer: AdapterLayer, shape: Shape, shapes: Mapping[str, Shape], scheme: KeyScheme) -> Shape:
    """The shape of DoRA's magnitudes: a column, or in peft a row. A convolution's keep their further dimensions."""
    if not layer.is_lora:
        return shape  # of a LyCORIS adapter, which other formats do not have
    outputs, extra_dims = shapes[layer.keys[LORA_B]][0], len(shapes[layer.keys[LORA_B]]) - 2
    column, row = (outputs, *([1] * (extra_dims + 1))), (1, outputs, *([1] * extra_dims)) if extra_dims else (outputs,)
    if shape not in (column, row):
        raise ModelError(
            f"{layer.module}: DoRA's magnitudes of shape {list(shape)} are not one per output ({outputs}), which "
            f"{scheme.name} files need"
        )
    return column if scheme.stores_alpha else row


def _metadata_scale(layer: AdapterLayer, rank: int, metadata: Mapping[str, str]) -> float:
    """The scale of a layer from diffusers' metadata: alpha / rank, with rsLoRA alpha / √rank; 1 without metadata."""
    facts = _adapter_metadata(layer, metadata)
    if facts is None:
        return 1.0
    alpha = _match_pattern(facts.get("alpha_pattern"), layer.module, facts.get("lora_alpha", rank))
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ModelError(f"its metadata has an alpha of {alpha!r} for {layer.module}, which is not a number")
    return alpha / (math.sqrt(rank) if facts.get("use_rslora") is True else rank)


def _adapter_metadata(layer: AdapterLayer, metadata: Mapping[str, str]) -> dict[str, object] | None:
    """diffusers' metadata about the component that holds the layer; None if there is none at all.

    For an expert after the first, entries of its own component (`transformer_2`) take precedence; a file with this
    expert alone has its entries under `transformer`.
    """
    text = metadata.get(DIFFUSERS_METADATA)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"its metadata {DIFFUSERS_METADATA} is not JSON ({error}); its alpha is unknown") from error
    if not isinstance(content, dict):
        raise ModelError(f"its metadata {DIFFUSERS_METADATA} is not a JSON object, so that its alpha is unknown")
    own_component = later_experts().get(layer.expert or "")
    for component in (*((f"{own_component}.",) if own_component else ()), "transformer.", "unet.", ""):
        facts = {key.removeprefix(component): value for key, value in content.items() if key.startswith(component)}
        if facts:
            return facts
    return {}


def _match_pattern(patterns: object, module: str, default: object) -> object:
    """The value of the first pattern that matches the whole name or an ending of it, as in peft."""
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        if not _PLAIN_PATTERN.fullmatch(pattern) or len(re.findall(r"[*+]", pattern)) > _MAX_REPEATS:
            raise ModelError(
                f"its metadata has an alpha for the pattern {pattern!r}, which is too complex to be evaluated safely, "
                "so that its alpha is unknown"
            )
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
