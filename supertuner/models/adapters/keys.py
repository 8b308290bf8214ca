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
from supertuner.models.adapters.keys_modules import LAYOUTS, NUMBER, Layout, family_of_layers, filled, members
from supertuner.models.adapters.keys_schemes import (
    KIND,
    NAMINGS,
    PART,
    SPELLINGS,
    STYLES,
    TENSORS,
    Naming,
    Scheme,
    spelled,
)

_NUMBERS: Final = re.compile(r"(?<![^._$])(?:0|[1-9][0-9]*|#)(?![^._$])")
"""A part of a name that is nothing but a number, whatever joins the parts."""
_TEXT_ENCODERS: Final = ("lora_te", "text_encoder", "text_model.", "te1_", "te2_")
MOST_LISTED: Final = 5


class Name(NamedTuple):
    """What a key means, whoever wrote it."""

    expert: str | None
    """None: the key does not say."""
    module: str
    """The layer in diffusers; see keys_modules for layers that the original fuses."""
    tensor: str

    def __str__(self) -> str:
        return f"{self.expert or 'model'}: {self.module}: {self.tensor}"


class _Meaning(NamedTuple):
    """One way to understand a key."""

    style: str
    naming: Naming
    family: str
    name: Name


@dataclass(frozen=True, slots=True)
class Reading:
    """What the keys of a file say."""

    scheme: Scheme
    families: tuple[str, ...]
    """Those whose layers they can be; more than one where the file has only layers that they share."""
    names: Mapping[str, Name]
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

    def report(self) -> str:
        """How many keys matched, and the others by name."""
        said = f"{len(self.names)} of {len(self.names) + len(self.unknown)} keys matched"
        listed = [f"{key} ({why})" for key, why in list(self.unknown.items())[:MOST_LISTED]]
        more = f" and {len(self.unknown) - MOST_LISTED} more" if len(self.unknown) > MOST_LISTED else ""
        return f"{said}; not matched: {', '.join(listed)}{more}" if listed else said


def read(keys: Iterable[str], family: str | None = None) -> Reading:
    """Understand the keys of a file, all by the same scheme. ModelError where none of them is understood.

    `family`: which it is known to be for; without it the keys decide.
    """
    wanted = _layouts(family)
    meanings = {key: [one for one in _meanings(key) if one.family in wanted] for key in keys}
    votes = Counter((one.style, one.naming, one.family) for found in meanings.values() for one in found)
    if not votes:
        raise ModelError(_none_matched(list(meanings), family))
    most = max(votes.values())
    style, naming, _ = min((vote for vote, count in votes.items() if count == most), key=_preference)
    families = tuple(one for one in LAYOUTS if votes.get((style, naming, one)) == most)
    names, unknown = _sorted_out(meanings, style, naming, families[0])
    return Reading(Scheme(style, naming, _spelling(meanings)), families, names, unknown)


def write(name: Name, scheme: Scheme, family: str) -> str:
    """The key of `name` in `scheme`. ModelError where the scheme has no word for it."""
    layout = LAYOUTS[family_of_layers(family)]
    style = STYLES[scheme.style]
    if name.expert not in style.prefixes:
        raise ModelError(
            f"{name} is of one expert among two, and {scheme.name} has no word for an expert"
            if name.expert is not None
            else f"{scheme.name} marks experts, and {name} does not say which it is of; name the expert"
        )
    row, numbers = _row(layout, name.module)
    own = layout.modules[row] if scheme.naming == "original" else (row if len(members(row)) == 1 else None)
    if own is None:
        raise ModelError(
            f"{name.module} is not a layer of its own in {scheme.name} keys of {family}; convert to one of diffusers' "
            "namings instead"
        )
    prefix = _prefix(style.prefixes[name.expert], layout, row)
    return f"{prefix}{filled(own, numbers).replace('.', style.separator)}.{spelled(name.tensor, scheme.spelling)}"


def fused_into(module: str, family: str) -> str | None:
    """The canonical name of the original's layer that `module` is a part of; None: it is one of its own there."""
    layout = LAYOUTS[family_of_layers(family)]
    row, numbers = _row(layout, module)
    found = next((one for one in layout.modules if len(members(one)) > 1 and row in members(one)), None)
    return None if found is None else filled(found, numbers)


def understood(keys: Iterable[str], family: str | None = None) -> list[tuple[str, Name]]:
    """Every meaning that a key can have on its own, without its neighbours."""
    wanted = _layouts(family)
    return [(key, one.name) for key in keys for one in _meanings(key) if one.family in wanted]


# ── a key taken apart ─────────────────────────────────────────────────────────────────────────────────────────────────


def _meanings(key: str) -> Iterator[_Meaning]:
    found = split_tensor(key)
    if found is None:
        return
    rest, tensor, _ = found
    for prefix, style, expert, template in _prefixes():
        if rest.startswith(prefix):
            for naming in NAMINGS:
                for layout, row, numbers in _looked_up(rest[len(prefix) :], STYLES[style].separator, naming):
                    if (expert is None or expert in layout.experts) and _prefix(template, layout, row) == prefix:
                        yield _Meaning(style, naming, layout.family, Name(expert, filled(row, numbers), tensor))


def split_tensor(key: str) -> tuple[str, str, frozenset[str]] | None:
    """(what stands before the tensor's name, the canonical tensor, the spellings it is in)."""
    parts = key.split(".")
    for count in (3, 2, 1):  # the longest first: `lora_A.default.weight`
        if len(parts) > count:
            found = _tensors().get(".".join(parts[-count:]))
            if found is not None:
                return ".".join(parts[:-count]), *found
    return None


def _looked_up(body: str, separator: str, naming: Naming) -> Iterator[tuple[Layout, str, tuple[str, ...]]]:
    """(family, row of its table, numbers) of every layer that is called `body`."""
    found = _index(separator, naming).get(_NUMBERS.sub(NUMBER, body))
    if found is None or NUMBER in body:
        return
    numbers = _NUMBERS.findall(body)
    for family, row, fixed in found:
        if all(want is None or want == given for want, given in zip(fixed, numbers, strict=True)):
            free = tuple(given for want, given in zip(fixed, numbers, strict=True) if want is None)
            yield LAYOUTS[family], row, free


def _row(layout: Layout, module: str) -> tuple[str, tuple[str, ...]]:
    for found, row, numbers in _looked_up(module, ".", "diffusers"):
        if found is layout:
            return row, numbers
    if module.endswith(")"):  # a fused layer: not found among diffusers' names, which it is none of
        numbers = tuple(_NUMBERS.findall(module.partition("(")[0]))
        row = _NUMBERS.sub(NUMBER, module.partition("(")[0]) + "(" + module.partition("(")[2]
        if row in layout.modules:
            return row, numbers
    raise ModelError(f"{module} is not a layer of {layout.family}")


@cache  # a function of the tables alone
def _index(separator: str, naming: Naming) -> Mapping[str, Sequence[tuple[str, str, tuple[str | None, ...]]]]:
    """A layer's name with `#` for its numbers → (family, row, its numbers: None where any will do)."""
    found: dict[str, list[tuple[str, str, tuple[str | None, ...]]]] = {}
    for family, layout in LAYOUTS.items():
        for row, original in layout.modules.items():
            own = original if naming == "original" else (row if len(members(row)) == 1 else None)
            if own is not None:
                flat = own.replace(".", separator)
                fixed = tuple(None if number == NUMBER else number for number in _NUMBERS.findall(flat))
                found.setdefault(_NUMBERS.sub(NUMBER, flat), []).append((family, row, fixed))
    return found


@cache  # a function of the tables alone
def _tensors() -> Mapping[str, tuple[str, frozenset[str]]]:
    """A tensor's name in some spelling → (canonical, the spellings that call it so)."""
    called = {spelled(tensor, spelling): tensor for spelling in SPELLINGS for tensor in TENSORS}
    return {
        name: (tensor, frozenset(spelling for spelling in SPELLINGS if spelled(tensor, spelling) == name))
        for name, tensor in called.items()
    }


@cache  # a function of the tables alone
def _prefixes() -> Sequence[tuple[str, str, str | None, str]]:
    """(what keys begin with, style, expert, the prefix as its style says it)."""
    parts = sorted({layout.part for layout in LAYOUTS.values()})
    return [
        (template.replace(PART, part).replace(KIND, kind), name, expert, template)
        for name, style in STYLES.items()
        for expert, template in style.prefixes.items()
        for part in (parts if PART in template else [""])
        for kind in (("conv", "linear") if KIND in template else [""])
    ]


def _prefix(template: str, layout: Layout, row: str) -> str:
    kind = "conv" if row in layout.convolutions else "linear"
    return template.replace(PART, layout.part).replace(KIND, kind)


# ── a file understood ─────────────────────────────────────────────────────────────────────────────────────────────────


def _sorted_out(
    meanings: Mapping[str, Sequence[_Meaning]], style: str, naming: Naming, family: str
) -> tuple[dict[str, Name], dict[str, str]]:
    names: dict[str, Name] = {}
    unknown: dict[str, str] = {}
    for key, found in meanings.items():
        fitting = {one.name for one in found if (one.style, one.naming, one.family) == (style, naming, family)}
        if len(fitting) == 1:
            names[key] = fitting.pop()
        elif fitting:
            unknown[key] = f"can mean {' or '.join(sorted(map(str, fitting)))}"
        else:
            unknown[key] = _why_not(key, found, family)
    times = Counter(names.values())
    for key in [key for key, name in names.items() if times[name] > 1]:
        unknown[key] = f"another key means {names.pop(key)} too"
    return names, unknown


def _why_not(key: str, found: Sequence[_Meaning], family: str | None) -> str:
    if found:
        other = found[0]
        return f"named after another scheme than the rest: {other.style}, {other.naming} names, {other.family}"
    if key.startswith(_TEXT_ENCODERS):
        return "of a text encoder, which is not trained here"
    if split_tensor(key) is None:
        return "does not end with the name of an adapter's tensor"
    return f"no layer of {family or 'a known family'} has this name"


def _none_matched(keys: Sequence[str], family: Literal[None] | str) -> str:
    shown = ", ".join(f"{key} ({_why_not(key, (), family)})" for key in keys[:MOST_LISTED])
    of = f" of {family}" if family is not None else f" of a known family ({', '.join(LAYOUTS)})"
    return (
        f"none of {len(keys)} keys is one of an adapter{of}: {shown or 'the file has no tensors'}; "
        "`supertuner adapter schemes` lists the names that are read"
    )


def _preference(vote: tuple[str, Naming, str]) -> tuple[int, int, int]:
    style, naming, family = vote
    return list(STYLES).index(style), NAMINGS.index(naming), list(LAYOUTS).index(family)


def _spelling(meanings: Mapping[str, Sequence[_Meaning]]) -> str:
    """The one of most tensors; a file of tensors that are called the same everywhere is as good as any: kohya's."""
    votes: Counter[str] = Counter()
    for key, found in meanings.items():
        split = split_tensor(key) if found else None
        if split is not None and len(split[2]) < len(SPELLINGS):
            votes.update(split[2])
    order = list(SPELLINGS)
    return min(votes, key=lambda one: (-votes[one], order.index(one))) if votes else "kohya"


def _layouts(family: str | None) -> Sequence[str]:
    return list(LAYOUTS) if family is None else [family_of_layers(family)]
