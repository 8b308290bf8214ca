"""One canonical name per (expert, layer, tensor) of an adapter, and every program's keys to it and from it. Pure.

    keys of a file ──read──► Reading: scheme, families, key → Name, and each key that is not understood with the reason
    Name ──write──► the key that a scheme gives it

A layer's canonical name is diffusers'. Flattened names (`blocks_0_attn1_to_q`) are never taken apart by rule: they are
looked up among the layers that the families have, so `transformer_1_blocks_1_…` is stage 1's block 1 and nothing else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, NamedTuple

from supertuner.core.errors import ModelError
from supertuner.models.adapters.keys_modules import (
    FAMILY_LAYERS,
    NUMBER_PLACEHOLDER,
    FamilyLayers,
    fill_numbers,
    fused_members,
    layer_table_family,
)
from supertuner.models.adapters.keys_schemes import (
    CANONICAL_TENSORS,
    COMPONENT_PLACEHOLDER,
    KEY_STYLES,
    KIND_PLACEHOLDER,
    LAYER_NAMINGS,
    TENSOR_SPELLINGS,
    KeyScheme,
    LayerNaming,
    spell_tensor,
)

_NUMBER_PATTERN: Final = re.compile(r"(?<![^._$])(?:0|[1-9][0-9]*|#)(?![^._$])")
"""A part of a name that is nothing but a number, whatever joins the parts."""
_TEXT_ENCODER_PREFIXES: Final = ("lora_te", "text_encoder", "text_model.", "te1_", "te2_")
MAX_LISTED: Final = 5


class AdapterTensorName(NamedTuple):
    """What a key means, whoever wrote it."""

    expert: str | None
    """None: the key does not say."""
    module: str
    """The layer in diffusers; see keys_modules for layers that the original fuses."""
    tensor: str

    def __str__(self) -> str:
        return f"{self.expert or 'model'}: {self.module}: {self.tensor}"


class _KeyMeaning(NamedTuple):
    """One way to understand a key."""

    style: str
    naming: LayerNaming
    family: str
    name: AdapterTensorName


@dataclass(frozen=True, slots=True)
class AdapterKeyReading:
    """What the keys of a file say."""

    scheme: KeyScheme
    families: tuple[str, ...]
    """Those whose layers they can be; more than one where the file has only layers that they share."""
    names: Mapping[str, AdapterTensorName]
    """Key → what it means, in the file's order."""
    unknown: Mapping[str, str]
    """Key → why it is not understood."""

    @property
    def experts(self) -> tuple[str | None, ...]:
        return tuple(sorted({name.expert for name in self.names.values()}, key=str))

    @property
    def family(self) -> str:
        """The one that is needed where names differ by family."""
        if len(self.families) != 1:
            raise ModelError(
                f"these layers are in {' and '.join(self.families)} alike; say which family the adapter is for "
                "(--family)"
            )
        return self.families[0]

    def summary(self) -> str:
        """How many keys matched, and the others by name."""
        matched = f"{len(self.names)} of {len(self.names) + len(self.unknown)} keys matched"
        listed = [f"{key} ({why})" for key, why in list(self.unknown.items())[:MAX_LISTED]]
        more = f" and {len(self.unknown) - MAX_LISTED} more" if len(self.unknown) > MAX_LISTED else ""
        return f"{matched}; not matched: {', '.join(listed)}{more}" if listed else matched


def read_keys(keys: Iterable[str], family: str | None = None) -> AdapterKeyReading:
    """Understand the keys of a file, all by the same scheme. ModelError where none of them is understood.

    `family`: which it is known to be for; without it the keys decide.
    """
    allowed_families = _allowed_families(family)
    meanings = {key: [one for one in _meanings(key) if one.family in allowed_families] for key in keys}
    votes = Counter((one.style, one.naming, one.family) for found in meanings.values() for one in found)
    if not votes:
        raise ModelError(_none_matched_message(list(meanings), family))
    most_votes = max(votes.values())
    style, naming, _ = min((vote for vote, count in votes.items() if count == most_votes), key=_preference)
    families = tuple(one for one in FAMILY_LAYERS if votes.get((style, naming, one)) == most_votes)
    names, unknown = _resolve_meanings(meanings, style, naming, families[0])
    return AdapterKeyReading(KeyScheme(style, naming, _majority_spelling(meanings)), families, names, unknown)


def format_key(name: AdapterTensorName, scheme: KeyScheme, family: str) -> str:
    """The key of `name` in `scheme`. ModelError where the scheme has no word for it."""
    layout = FAMILY_LAYERS[layer_table_family(family)]
    style = KEY_STYLES[scheme.style]
    if name.expert not in style.prefixes:
        raise ModelError(
            f"{name} is of one expert among two, and {scheme.name} has no word for an expert"
            if name.expert is not None
            else f"{scheme.name} marks experts, and {name} does not say which it is of; name the expert"
        )
    row, numbers = _find_row(layout, name.module)
    layer_name = (
        layout.original_names[row] if scheme.naming == "original" else (row if len(fused_members(row)) == 1 else None)
    )
    if layer_name is None:
        raise ModelError(
            f"{name.module} is not a layer of its own in {scheme.name} keys of {family}; convert to one of diffusers' "
            "namings instead"
        )
    prefix = _prefix(style.prefixes[name.expert], layout, row)
    return f"{prefix}{fill_numbers(layer_name, numbers).replace('.', style.separator)}.{spell_tensor(name.tensor, scheme.spelling)}"


def fused_layer(module: str, family: str) -> str | None:
    """The canonical name of the original's layer that `module` is a part of; None: it is one of its own there."""
    layout = FAMILY_LAYERS[layer_table_family(family)]
    row, numbers = _find_row(layout, module)
    fused_row = next(
        (one for one in layout.original_names if len(fused_members(one)) > 1 and row in fused_members(one)), None
    )
    return None if fused_row is None else fill_numbers(fused_row, numbers)


def possible_meanings(keys: Iterable[str], family: str | None = None) -> list[tuple[str, AdapterTensorName]]:
    """Every meaning that a key can have on its own, without its neighbours."""
    allowed_families = _allowed_families(family)
    return [(key, one.name) for key in keys for one in _meanings(key) if one.family in allowed_families]


# ── a key taken apart ─────────────────────────────────────────────────────────────────────────────────────────────────


def _meanings(key: str) -> Iterator[_KeyMeaning]:
    split_key = split_tensor_name(key)
    if split_key is None:
        return
    rest, tensor, _ = split_key
    for prefix, style, expert, template in _prefixes():
        if rest.startswith(prefix):
            for naming in LAYER_NAMINGS:
                for layout, row, numbers in _find_layers(rest[len(prefix) :], KEY_STYLES[style].separator, naming):
                    if (expert is None or expert in layout.experts) and _prefix(template, layout, row) == prefix:
                        yield _KeyMeaning(
                            style, naming, layout.family, AdapterTensorName(expert, fill_numbers(row, numbers), tensor)
                        )


def split_tensor_name(key: str) -> tuple[str, str, frozenset[str]] | None:
    """(what stands before the tensor's name, the canonical tensor, the spellings it is in)."""
    parts = key.split(".")
    for count in (3, 2, 1):  # the longest first: `lora_A.default.weight`
        if len(parts) > count:
            canonical = _tensor_index().get(".".join(parts[-count:]))
            if canonical is not None:
                return ".".join(parts[:-count]), *canonical
    return None


def _find_layers(body: str, separator: str, naming: LayerNaming) -> Iterator[tuple[FamilyLayers, str, tuple[str, ...]]]:
    """(family, row of its table, numbers) of every layer that is called `body`."""
    candidates = _layer_index(separator, naming).get(_NUMBER_PATTERN.sub(NUMBER_PLACEHOLDER, body))
    if candidates is None or NUMBER_PLACEHOLDER in body:
        return
    numbers = _NUMBER_PATTERN.findall(body)
    for family, row, fixed_numbers in candidates:
        if all(want is None or want == given for want, given in zip(fixed_numbers, numbers, strict=True)):
            free_numbers = tuple(given for want, given in zip(fixed_numbers, numbers, strict=True) if want is None)
            yield FAMILY_LAYERS[family], row, free_numbers


def _find_row(layout: FamilyLayers, module: str) -> tuple[str, tuple[str, ...]]:
    for candidate, row, numbers in _find_layers(module, ".", "diffusers"):
        if candidate is layout:
            return row, numbers
    if module.endswith(")"):  # a fused layer: not found among diffusers' names, which it is none of
        numbers = tuple(_NUMBER_PATTERN.findall(module.partition("(")[0]))
        row = _NUMBER_PATTERN.sub(NUMBER_PLACEHOLDER, module.partition("(")[0]) + "(" + module.partition("(")[2]
        if row in layout.original_names:
            return row, numbers
    raise ModelError(f"{module} is not a layer of {layout.family}")


@cache  # a function of the tables alone
def _layer_index(
    separator: str, naming: LayerNaming
) -> Mapping[str, Sequence[tuple[str, str, tuple[str | None, ...]]]]:
    """A layer's name with `#` for its numbers → (family, row, its numbers: None where any will do)."""
    index: dict[str, list[tuple[str, str, tuple[str | None, ...]]]] = {}
    for family, layout in FAMILY_LAYERS.items():
        for row, original in layout.original_names.items():
            layer_name = original if naming == "original" else (row if len(fused_members(row)) == 1 else None)
            if layer_name is not None:
                flat = layer_name.replace(".", separator)
                fixed_numbers = tuple(
                    None if number == NUMBER_PLACEHOLDER else number for number in _NUMBER_PATTERN.findall(flat)
                )
                index.setdefault(_NUMBER_PATTERN.sub(NUMBER_PLACEHOLDER, flat), []).append((family, row, fixed_numbers))
    return index


@cache  # a function of the tables alone
def _tensor_index() -> Mapping[str, tuple[str, frozenset[str]]]:
    """A tensor's name in some spelling → (canonical, the spellings that call it so)."""
    tensor_by_name = {
        spell_tensor(tensor, spelling): tensor for spelling in TENSOR_SPELLINGS for tensor in CANONICAL_TENSORS
    }
    return {
        name: (tensor, frozenset(spelling for spelling in TENSOR_SPELLINGS if spell_tensor(tensor, spelling) == name))
        for name, tensor in tensor_by_name.items()
    }


@cache  # a function of the tables alone
def _prefixes() -> Sequence[tuple[str, str, str | None, str]]:
    """(what keys begin with, style, expert, the prefix as its style says it)."""
    parts = sorted({layout.component for layout in FAMILY_LAYERS.values()})
    return [
        (template.replace(COMPONENT_PLACEHOLDER, part).replace(KIND_PLACEHOLDER, kind), name, expert, template)
        for name, style in KEY_STYLES.items()
        for expert, template in style.prefixes.items()
        for part in (parts if COMPONENT_PLACEHOLDER in template else [""])
        for kind in (("conv", "linear") if KIND_PLACEHOLDER in template else [""])
    ]


def _prefix(template: str, layout: FamilyLayers, row: str) -> str:
    kind = "conv" if row in layout.convolutions else "linear"
    return template.replace(COMPONENT_PLACEHOLDER, layout.component).replace(KIND_PLACEHOLDER, kind)


# ── a file understood ─────────────────────────────────────────────────────────────────────────────────────────────────


def _resolve_meanings(
    meanings: Mapping[str, Sequence[_KeyMeaning]], style: str, naming: LayerNaming, family: str
) -> tuple[dict[str, AdapterTensorName], dict[str, str]]:
    names: dict[str, AdapterTensorName] = {}
    unknown: dict[str, str] = {}
    for key, candidates in meanings.items():
        matching = {one.name for one in candidates if (one.style, one.naming, one.family) == (style, naming, family)}
        if len(matching) == 1:
            names[key] = matching.pop()
        elif matching:
            unknown[key] = f"can mean {' or '.join(sorted(map(str, matching)))}"
        else:
            unknown[key] = _unmatched_reason(key, candidates, family)
    occurrences = Counter(names.values())
    for key in [key for key, name in names.items() if occurrences[name] > 1]:
        unknown[key] = f"another key means {names.pop(key)} too"
    return names, unknown


def _unmatched_reason(key: str, candidates: Sequence[_KeyMeaning], family: str | None) -> str:
    if candidates:
        other = candidates[0]
        return f"named after another scheme than the rest: {other.style}, {other.naming} names, {other.family}"
    if key.startswith(_TEXT_ENCODER_PREFIXES):
        return "of a text encoder, which is not trained here"
    if split_tensor_name(key) is None:
        return "does not end with the name of an adapter's tensor"
    return f"no layer of {family or 'a known family'} has this name"


def _none_matched_message(keys: Sequence[str], family: Literal[None] | str) -> str:
    shown = ", ".join(f"{key} ({_unmatched_reason(key, (), family)})" for key in keys[:MAX_LISTED])
    family_text = f" of {family}" if family is not None else f" of a known family ({', '.join(FAMILY_LAYERS)})"
    return (
        f"none of {len(keys)} keys is one of an adapter{family_text}: {shown or 'the file has no tensors'}; "
        "`supertuner adapter schemes` lists the names that are read"
    )


def _preference(vote: tuple[str, LayerNaming, str]) -> tuple[int, int, int]:
    style, naming, family = vote
    return list(KEY_STYLES).index(style), LAYER_NAMINGS.index(naming), list(FAMILY_LAYERS).index(family)


def _majority_spelling(meanings: Mapping[str, Sequence[_KeyMeaning]]) -> str:
    """The one of most tensors; a file of tensors that are called the same everywhere is as good as any: kohya's."""
    votes: Counter[str] = Counter()
    for key, candidates in meanings.items():
        split = split_tensor_name(key) if candidates else None
        if split is not None and len(split[2]) < len(TENSOR_SPELLINGS):
            votes.update(split[2])
    order = list(TENSOR_SPELLINGS)
    return min(votes, key=lambda one: (-votes[one], order.index(one))) if votes else "kohya"


def _allowed_families(family: str | None) -> Sequence[str]:
    return list(FAMILY_LAYERS) if family is None else [layer_table_family(family)]
