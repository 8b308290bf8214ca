"""From one scheme's file to another's as a plan: which bytes become which tensor. Pure; no tensor is touched here.

Names are not all that differs. What also has to be right, for the file to mean the same:

- kohya's readers multiply a LoRA by alpha / rank and look for `.alpha`; diffusers' and peft's take the matrices as they
  are. So alpha goes into lora_B on the way to them, and is written as a tensor on the way back.
- diffusers' own files may say an alpha in their metadata; it counts the same.
- DoRA's magnitudes have one number per output, as a row for peft and as a column for the others.
- a layer that the original fuses is split by rows: each part of the output has its own rows of lora_B and the same A.
  The other way the parts are put together, as blocks of larger matrices.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias

from supertuner.core.errors import ModelError
from supertuner.models.adapters.keys import Name, Reading, fused_into, write
from supertuner.models.adapters.keys_modules import members
from supertuner.models.adapters.keys_schemes import ALPHA, DORA, LORA_A, LORA_B, LORA_BIAS, LOW, Scheme

Shape: TypeAlias = tuple[int, ...]
DIFFUSERS_METADATA: Final = "lora_adapter_metadata"
"""Where diffusers notes alpha, rank and their exceptions, as JSON."""
OUTDATED: Final = (DIFFUSERS_METADATA, "modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash")
"""Metadata that is no longer true of a converted file."""
_MLP_RATIO: Final = 4
"""Of Flux: rows of `proj_mlp` per row of `to_q`, in the layer that holds both."""
_PLAIN_PATTERN: Final = re.compile(r"\^?(?:[A-Za-z0-9_.]|\\[._-]|-|\.\*|\\d\+|\[0-9\]\+)+\$?")
_MOST_REPEATS: Final = 3
"""Of `.*` and the like in a pattern: a stranger's file must not keep us searching."""


class Block(NamedTuple):
    """A tensor of the old file inside one of the new, which is zero elsewhere."""

    source: str
    row: int
    column: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of the new file."""

    key: str
    shape: Shape
    source: str | None
    """Key in the old file; None: `value` is all it holds, or it is put together of `blocks`."""
    rows: tuple[int, int] | None = None
    """Those of the source; None: all."""
    scale: float = 1.0
    value: float = 0.0
    blocks: tuple[Block, ...] = ()


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
    fused: dict[tuple[str | None, str], list[Layer]] = {}
    for layer in layers_of(reading):
        _check_pair(layer)
        expert = layer.expert if scheme.marks_experts else None
        whole = fused_into(layer.module, family) if scheme.naming == "original" and "(" not in layer.module else None
        if whole is not None:
            fused.setdefault((expert, whole), []).append(layer)
            continue
        for module, part in _parts(layer, shapes, scheme):
            for piece, tensor in _pieces(layer, part, shapes, alphas, metadata, scheme):
                found.append(replace(piece, key=write(Name(expert, module, tensor), scheme, family)))
    for (expert, whole), layers in fused.items():
        scales = [scale_of(layer, shapes, alphas, metadata) if layer.is_lora else 1.0 for layer in layers]
        for piece, tensor in _together(whole, layers, scales, shapes, scheme):
            found.append(replace(piece, key=write(Name(expert, whole, tensor), scheme, family)))
    twice = len(found) - len({piece.key for piece in found})
    assert twice == 0, f"{twice} keys of {scheme.name} stand for two tensors"
    return found


def _check_pair(layer: Layer) -> None:
    """Half a LoRA would be passed over by some programs, and end others."""
    halves = [tensor for tensor in (LORA_A, LORA_B) if tensor in layer.keys]
    if len(halves) == 1:
        other = LORA_B if halves == [LORA_A] else LORA_A
        raise ModelError(
            f"{layer.module} has {halves[0]} ({layer.keys[halves[0]]}) and no {other}; the file is a part of one, or "
            "damaged"
        )


def scale_of(
    layer: Layer, shapes: Mapping[str, Shape], alphas: Mapping[str, float], metadata: Mapping[str, str]
) -> float:
    """What a LoRA's product is multiplied with."""
    rank = _rank(layer, shapes)
    if ALPHA in layer.keys:
        return alphas[layer.keys[ALPHA]] / rank
    return _metadata_scale(layer, rank, metadata)


def _rank(layer: Layer, shapes: Mapping[str, Shape]) -> int:
    """Of a LoRA whose two matrices belong together."""
    one, two = shapes[layer.keys[LORA_A]], shapes[layer.keys[LORA_B]]
    if len(one) < 2 or len(two) != len(one) or one[0] == 0 or two[1] != one[0]:
        raise ModelError(f"{layer.module}: matrices of {list(one)} and {list(two)} are no LoRA")
    return one[0]


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
    if layer.is_lora:
        _rank(layer, shapes)
    sizes = {shapes[layer.keys[one]][:1] for one in (LORA_B, "diff", "diff_b", LORA_BIAS) if one in layer.keys}
    if len(sizes) != 1 or sizes == {()}:
        raise ModelError(
            f"{layer.module} is {len(inside)} layers in diffusers, and its tensors do not say of what size"
        )
    outputs = sizes.pop()[0]
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


def _together(
    whole: str, layers: Sequence[Layer], scales: Sequence[float], shapes: Mapping[str, Shape], scheme: Scheme
) -> Iterator[tuple[Piece, str]]:
    """LoRAs of queries, keys and values as one of their common layer: A above A, and B's on the diagonal. Exact.

    Its rank is the sum of theirs; what is not in the file stays zero.
    """
    odd = sorted({tensor for layer in layers for tensor in layer.keys} - {LORA_A, LORA_B, ALPHA})
    if odd or not all(layer.is_lora for layer in layers):
        raise ModelError(
            f"{whole} is one layer in {scheme.name} keys; of its parts only plain LoRA can be put together"
        )
    inside = members(whole)
    first = layers[0]
    share = shapes[first.keys[LORA_B]][0] // (_MLP_RATIO if inside.index(first.module) == 3 else 1)
    outputs = [share] * 3 + ([_MLP_RATIO * share] if len(inside) == 4 else [])
    ranks, above, diagonal = 0, [], []
    for layer, scale in zip(layers, scales, strict=True):
        place = inside.index(layer.module)
        rank, inputs = _rank(layer, shapes), shapes[first.keys[LORA_A]][1:]
        if shapes[layer.keys[LORA_B]] != (outputs[place], rank) or shapes[layer.keys[LORA_A]] != (rank, *inputs):
            raise ModelError(f"{whole} is one layer in {scheme.name} keys, and its parts do not fit together")
        above.append(Block(layer.keys[LORA_A], ranks, 0))
        diagonal.append(Block(layer.keys[LORA_B], sum(outputs[:place]), ranks, scale))
        ranks += rank
    yield Piece("", (ranks, shapes[first.keys[LORA_A]][1]), None, blocks=tuple(above)), LORA_A
    yield Piece("", (sum(outputs), ranks), None, blocks=tuple(diagonal)), LORA_B
    if scheme.keeps_alpha:
        yield Piece("", (), None, value=float(ranks)), ALPHA


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


def _metadata_scale(layer: Layer, rank: int, metadata: Mapping[str, str]) -> float:
    facts = _metadata_facts(layer, metadata)
    if facts is None:
        return 1.0
    alpha = _pattern(facts.get("alpha_pattern"), layer.module, facts.get("lora_alpha", rank))
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ModelError(f"its metadata says an alpha of {alpha!r} for {layer.module}, which is no number")
    return alpha / (math.sqrt(rank) if facts.get("use_rslora") is True else rank)


def _metadata_facts(layer: Layer, metadata: Mapping[str, str]) -> dict[str, object] | None:
    """What diffusers notes of the part of the pipeline that the layer is in; None: nothing at all.

    The second expert's own facts count before the first's: a file of it alone says `transformer.` too.
    """
    text = metadata.get(DIFFUSERS_METADATA)
    if text is None:
        return None
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"its metadata {DIFFUSERS_METADATA} is not JSON ({error}); what its alpha is cannot be known"
        ) from error
    if not isinstance(said, dict):
        raise ModelError(f"its metadata {DIFFUSERS_METADATA} is not an object; what its alpha is cannot be known")
    for part in (*(("transformer_2.",) if layer.expert == LOW else ()), "transformer.", "unet.", ""):
        facts = {key.removeprefix(part): value for key, value in said.items() if key.startswith(part)}
        if facts:
            return facts
    return {}


def _pattern(patterns: object, module: str, otherwise: object) -> object:
    """As peft looks it up: a pattern that fits the whole name or an ending of it, the first that does."""
    for one, value in patterns.items() if isinstance(patterns, dict) else ():
        if not _PLAIN_PATTERN.fullmatch(one) or len(re.findall(r"[*+]", one)) > _MOST_REPEATS:
            raise ModelError(
                f"its metadata says the alpha of {one!r}, a pattern that is not taken from a file; what its alpha is "
                "cannot be known"
            )
        if re.match(rf"(.*\.)?({one})$", module):
            return value
    return otherwise
