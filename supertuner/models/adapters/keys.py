"""Translates the keys of adapter files of many programs to canonical names (expert, layer, tensor), and back. Pure.

    keys of a file ──read_keys──► AdapterKeyReading: scheme, families, key → canonical name, unknown keys and why
    canonical name ──format_key──► the key in a scheme

The canonical name of a layer is that of diffusers. Reading a key has three steps:

1. The tensor's name is split off at the end, in any known spelling (`split_tensor_name`).
2. Every known prefix that the rest starts with is tried; it determines the style and the expert (`_prefixes`).
3. What remains is looked up in a table of all layer names of all families, with `#` in place of numbers
   (`_layer_index`). A flattened name (`blocks_0_attn1_to_q`) is never split at its underscores by rule: underscores
   occur within names as well, so only the table can tell where they stand for dots. For example
   `transformer_1_blocks_1_…` is block 1 of stage 1, because no layer is named `1.blocks.1…`.

One key alone can have several meanings. All keys of a file share one scheme, so the combination of style, naming and
family that explains the most keys decides; keys that it does not explain are reported, never guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Final, NamedTuple

from supertuner.core.errors import ModelError
from supertuner.models.adapters.family_layers import FAMILY_LAYERS, family_layers
from supertuner.models.adapters.keys_modules import NUMBER_PLACEHOLDER, FamilyLayers, fill_numbers, fused_members
from supertuner.models.adapters.keys_schemes import (
    CANONICAL_TENSORS,
    COMPONENT_PLACEHOLDER,
    EXPERT_COMPONENT_PLACEHOLDER,
    KEY_STYLES,
    KIND_PLACEHOLDER,
    LAYER_NAMINGS,
    PROCESSOR_TENSORS,
    STAGE_PLACEHOLDER,
    TENSOR_SPELLINGS,
    KeyScheme,
    KeyStyle,
    LayerNaming,
    spell_tensor,
)

_NUMBER_PATTERN: Final = re.compile(r"(?<![^._$])(?:0|[1-9][0-9]*|#)(?![^._$])")
"""A part of a name that is a number (or `#`), for any separator."""
_TEXT_ENCODER_PREFIXES: Final = ("lora_te", "text_encoder", "text_model.", "te1_", "te2_")
MAX_LISTED: Final = 5


class AdapterTensorName(NamedTuple):
    """The canonical meaning of a key, independent of the program that wrote it."""

    expert: str | None
    """None if the key does not name an expert."""
    module: str
    """The layer's name in diffusers; see keys_modules for layers that are fused in the original code."""
    tensor: str

    def __str__(self) -> str:
        return f"{self.expert or 'model'}: {self.module}: {self.tensor}"


class _KeyMeaning(NamedTuple):
    """One possible meaning of a key."""

    style: str
    naming: LayerNaming
    family: str
    name: AdapterTensorName


@dataclass(frozen=True, slots=True)
class AdapterKeyReading:
    """The result of reading the keys of a file."""

    scheme: KeyScheme
    families: tuple[str, ...]
    """The families that have all these layers; more than one if the file has only layers that they share."""
    names: Mapping[str, AdapterTensorName]
    """Key → canonical name, in the file's order."""
    unknown: Mapping[str, str]
    """Key → why it has no canonical name."""

    @property
    def experts(self) -> tuple[str | None, ...]:
        return tuple(sorted({name.expert for name in self.names.values()}, key=str))

    @property
    def family(self) -> str:
        """The only family. Raises ModelError if there are several."""
        if len(self.families) != 1:
            raise ModelError(
                f"the layers of this adapter exist in {' and '.join(self.families)}; choose the family with `family`"
            )
        return self.families[0]

    def summary(self) -> str:
        """The number of keys that matched, and the names of others."""
        matched = f"{len(self.names)} of {len(self.names) + len(self.unknown)} keys matched"
        listed = [f"{key} ({why})" for key, why in list(self.unknown.items())[:MAX_LISTED]]
        more = f" and {len(self.unknown) - MAX_LISTED} more" if len(self.unknown) > MAX_LISTED else ""
        return f"{matched}; not matched: {', '.join(listed)}{more}" if listed else matched


def read_keys(keys: Iterable[str], family: str | None = None) -> AdapterKeyReading:
    """Read all keys of a file by one scheme. Raises ModelError if none of them has a meaning.

    `family` restricts the reading to one family; by default the keys decide.
    """
    allowed = list(FAMILY_LAYERS) if family is None else [family_layers(family).family]
    meanings = {key: [m for m in possible_meanings(key) if m.family in allowed] for key in keys}
    # Each key votes for every scheme that explains it. The scheme with the most votes is that of the file; of equal
    # ones, the first in the tables (`_preference`).
    votes = Counter((m.style, m.naming, m.family) for candidates in meanings.values() for m in candidates)
    if not votes:
        raise ModelError(_none_matched_message(list(meanings), family))
    most_votes = max(votes.values())
    style, naming, _ = min((vote for vote, count in votes.items() if count == most_votes), key=_preference)
    families = tuple(name for name in FAMILY_LAYERS if votes.get((style, naming, name)) == most_votes)
    names, unknown = _resolve_meanings(meanings, style, naming, families[0])
    return AdapterKeyReading(KeyScheme(style, naming, _majority_spelling(meanings)), families, names, unknown)


def format_key(name: AdapterTensorName, scheme: KeyScheme, family: str) -> str:
    """The key of a canonical name in a scheme. Raises ModelError if the scheme cannot express it."""
    layout = family_layers(family)
    style = KEY_STYLES[scheme.style]
    if name.expert not in _marked_experts(style, layout):
        raise ModelError(
            f"{name} belongs to one of several experts, but {scheme.name} keys cannot name an expert"
            if name.expert is not None
            else f"{scheme.name} keys name an expert, but that of {name} is unknown; set `expert`"
        )
    row, numbers = _find_row(layout, name.module)
    layer_name = _layer_name(layout, row, scheme.naming)
    if layer_name is None:
        raise ModelError(
            f"{name.module} is not a separate layer in {scheme.name} keys of {family}; convert to a scheme with "
            "diffusers' layer names instead"
        )
    prefix = _prefix(style.prefix, layout, row, name.expert)
    layer = fill_numbers(layer_name, numbers).replace(".", style.separator)
    return f"{prefix}{layer}.{spell_tensor(name.tensor, scheme.spelling)}"


def fused_layer(module: str, family: str) -> str | None:
    """The canonical name of the fused layer that contains `module` in the original code; None if there is none."""
    layout = family_layers(family)
    row, numbers = _find_row(layout, module)
    fused_rows = (fused for fused in layout.original_names if fused.endswith(")") and row in fused_members(fused))
    fused_row = next(fused_rows, None)
    return None if fused_row is None else fill_numbers(fused_row, numbers)


# ── parsing one key ───────────────────────────────────────────────────────────────────────────────────────────────────


def possible_meanings(key: str) -> Iterator[_KeyMeaning]:
    """Every meaning that a key can have by itself, without the other keys of its file."""
    split_key = split_tensor_name(key)
    if split_key is None:
        return
    rest, tensor, _ = split_key
    for prefix, name in _prefixes():
        if rest.startswith(prefix):
            style = KEY_STYLES[name]
            for naming in LAYER_NAMINGS:
                for layout, row, numbers in _find_layers(rest[len(prefix) :], style.separator, naming):
                    for expert in _marked_experts(style, layout):
                        if _prefix(style.prefix, layout, row, expert) == prefix:
                            meaning = AdapterTensorName(expert, fill_numbers(row, numbers), tensor)
                            yield _KeyMeaning(name, naming, layout.family, meaning)


def split_tensor_name(key: str) -> tuple[str, str, frozenset[str]] | None:
    """(key without the tensor's name, canonical tensor, spellings with this name); None without a known tensor."""
    parts = key.split(".")
    for count in (3, 2, 1):  # the longest first, for example `lora_A.default.weight`
        if len(parts) > count:
            canonical = _tensor_index().get(".".join(parts[-count:]))
            if canonical is not None:
                return ".".join(parts[:-count]), *canonical
    return None


def _find_layers(body: str, separator: str, naming: LayerNaming) -> Iterator[tuple[FamilyLayers, str, tuple[str, ...]]]:
    """(family, row of its table, numbers) of every layer with the name `body`."""
    candidates = _layer_index(separator, naming).get(_NUMBER_PATTERN.sub(NUMBER_PLACEHOLDER, body))
    if candidates is None or NUMBER_PLACEHOLDER in body:
        return
    numbers = _NUMBER_PATTERN.findall(body)
    for family, row, row_numbers in candidates:
        pairs = list(zip(row_numbers, numbers, strict=True))
        if all(expected in (NUMBER_PLACEHOLDER, number) for expected, number in pairs):
            yield FAMILY_LAYERS[family], row, tuple(n for expected, n in pairs if expected == NUMBER_PLACEHOLDER)


def _find_row(layout: FamilyLayers, module: str) -> tuple[str, tuple[str, ...]]:
    for candidate, row, numbers in _find_layers(module, ".", "diffusers"):
        if candidate is layout:
            return row, numbers
    if module.endswith(")"):  # a fused layer, which is not in the index of diffusers' names
        block, _, members = module.partition("(")
        row = f"{_NUMBER_PATTERN.sub(NUMBER_PLACEHOLDER, block)}({members}"
        if row in layout.original_names or row in layout.processor_names.values():
            return row, tuple(_NUMBER_PATTERN.findall(block))
    raise ModelError(f"{module} is not a layer of {layout.family}")


def _layer_name(layout: FamilyLayers, row: str, naming: LayerNaming) -> str | None:
    """The name of a row; None if it is not a separate layer in this naming."""
    if naming == "original":
        return layout.original_names.get(row)
    return None if row.endswith(")") else row


@cache  # a function of the tables alone
def _layer_index(separator: str, naming: LayerNaming) -> Mapping[str, Sequence[tuple[str, str, tuple[str, ...]]]]:
    """A layer's name with `#` for all its numbers → (family, row, its numbers; `#`: any number)."""
    index: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {}
    for family, layout in FAMILY_LAYERS.items():
        names = [(_layer_name(layout, row, naming), row) for row in layout.original_names]
        for layer_name, row in (*names, *layout.processor_names.items()):
            if layer_name:
                flat = layer_name.replace(".", separator)
                entry = (family, row, tuple(_NUMBER_PATTERN.findall(flat)))
                index.setdefault(_NUMBER_PATTERN.sub(NUMBER_PLACEHOLDER, flat), []).append(entry)
    return index


@cache  # a function of the tables alone
def _tensor_index() -> Mapping[str, tuple[str, frozenset[str]]]:
    """A tensor's name → (canonical tensor, the spellings with this name)."""
    index: dict[str, tuple[str, frozenset[str]]] = {}
    for spelling, tensor in product(TENSOR_SPELLINGS, CANONICAL_TENSORS):
        name = spell_tensor(tensor, spelling)
        index[name] = (tensor, index.get(name, (tensor, frozenset()))[1] | {spelling})
    return index | {name: (tensor, frozenset({"old diffusers"})) for name, tensor in PROCESSOR_TENSORS.items()}


def _marked_experts(style: KeyStyle, layout: FamilyLayers) -> Sequence[str | None]:
    """The experts that keys of this style can name; None alone if they name none."""
    if not style.marks_experts:
        return (None,)
    return tuple(layout.experts) if len(layout.experts) > 1 else ()


@cache  # a function of the tables alone
def _prefixes() -> Sequence[tuple[str, str]]:
    """(prefix of keys, style) for all that occur in some family."""
    return list(
        dict.fromkeys(
            (_prefix_of_expert(style.prefix, layout, expert).replace(KIND_PLACEHOLDER, kind), name)
            for name, style in KEY_STYLES.items()
            for layout in FAMILY_LAYERS.values()
            for expert in _marked_experts(style, layout)
            for kind in ("conv", "linear")
        )
    )


def _prefix(template: str, layout: FamilyLayers, row: str, expert: str | None) -> str:
    kind = "conv" if row in layout.convolutions else "linear"
    return _prefix_of_expert(template, layout, expert).replace(KIND_PLACEHOLDER, kind)


def _prefix_of_expert(template: str, layout: FamilyLayers, expert: str | None) -> str:
    """The prefix without the kind of layer."""
    prefix = template.replace(COMPONENT_PLACEHOLDER, layout.component)
    if expert is None:
        return prefix
    stage = list(layout.experts).index(expert) + 1
    return prefix.replace(STAGE_PLACEHOLDER, str(stage)).replace(EXPERT_COMPONENT_PLACEHOLDER, layout.experts[expert])


# ── reading a whole file ──────────────────────────────────────────────────────────────────────────────────────────────


def _resolve_meanings(
    meanings: Mapping[str, Sequence[_KeyMeaning]], style: str, naming: LayerNaming, family: str
) -> tuple[dict[str, AdapterTensorName], dict[str, str]]:
    """Key → canonical name in this scheme and family, and key → reason for keys without one."""
    names: dict[str, AdapterTensorName] = {}
    unknown: dict[str, str] = {}
    for key, candidates in meanings.items():
        matching = {m.name for m in candidates if (m.style, m.naming, m.family) == (style, naming, family)}
        if len(matching) == 1:
            names[key] = matching.pop()
        elif matching:
            unknown[key] = f"can mean {' or '.join(sorted(map(str, matching)))}"
        else:
            unknown[key] = _unmatched_reason(key, candidates, family)
    occurrences = Counter(names.values())
    for key in [key for key, name in names.items() if occurrences[name] > 1]:
        unknown[key] = f"another key also means {names.pop(key)}"
    return names, unknown


def _unmatched_reason(key: str, candidates: Sequence[_KeyMeaning], family: str | None) -> str:
    if candidates:
        other = candidates[0]
        return f"it follows another scheme than the rest: {other.style}, {other.naming} names, {other.family}"
    if key.startswith(_TEXT_ENCODER_PREFIXES):
        return "it belongs to a text encoder, which is not supported"
    if split_tensor_name(key) is None:
        return "it does not end with the name of an adapter tensor"
    return f"no layer of {family or 'a known family'} has this name"


def _none_matched_message(keys: Sequence[str], family: str | None) -> str:
    shown = ", ".join(f"{key} ({_unmatched_reason(key, (), family)})" for key in keys[:MAX_LISTED])
    families = family or f"a known family ({', '.join(FAMILY_LAYERS)})"
    return (
        f"none of {len(keys)} keys belongs to an adapter of {families}: {shown or 'the file has no tensors'}; "
        "`supertuner adapter schemes` lists the supported schemes"
    )


def _preference(vote: tuple[str, LayerNaming, str]) -> tuple[int, int, int]:
    style, naming, family = vote
    return list(KEY_STYLES).index(style), LAYER_NAMINGS.index(naming), list(FAMILY_LAYERS).index(family)


def _majority_spelling(meanings: Mapping[str, Sequence[_KeyMeaning]]) -> str:
    """The spelling of the most tensors; kohya's if all tensors have the same name in every spelling."""
    votes: Counter[str] = Counter()
    for key, candidates in meanings.items():
        split = split_tensor_name(key) if candidates else None
        if split is not None and len(split[2]) < len(TENSOR_SPELLINGS):
            votes.update(split[2])
    order = list(TENSOR_SPELLINGS)
    return min(votes, key=lambda spelling: (-votes[spelling], order.index(spelling))) if votes else "kohya"
