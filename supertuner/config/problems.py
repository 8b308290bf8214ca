"""Every problem of a configuration in words to act on: the place, the value, what is allowed, the nearest key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pydantic import ValidationError

from supertuner.config.dialects.table import dataset_rows, inherited, run_rows
from supertuner.config.settings.block import CONTRADICTION
from supertuner.config.sources import key_path as places
from supertuner.config.sources.key_path import Place
from supertuner.config.sources.values import allowed, choices, shown
from supertuner.core.errors import Problem
from supertuner.core.types import JSON


def edits(a: str, b: str) -> int:
    """Letters to insert, delete, replace or swap with a neighbour to get from one word to the other."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, last, row = row, before, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], last[j - 2] + 1)
    return row[-1]


def nearest(word: str, candidates: Sequence[str]) -> str | None:
    """The candidate with the fewest edits, the earlier one among equals; None if none is near."""
    plain = word.lower().replace("-", "_")
    limit, found = max(1, len(plain) // 3), None
    for candidate in candidates:
        name = candidate.rsplit(".", 1)[-1].lower()
        if edits_at_least(plain, name) <= limit and (needed := edits(plain, name)) <= limit:
            found, limit = candidate, needed - 1  # only a nearer one is better
    return found


def edits_at_least(a: str, b: str) -> int:
    """A number that `edits` is never below, found at once: letters that one word has and the other has not."""
    if a == b:
        return 0
    mine, theirs = Counter(a), Counter(b)
    return max((mine - theirs).total(), (theirs - mine).total())


def unknown_key(name: str, block: str, prefix: str = "") -> str:
    """What to say about a key that is not a setting of the block (a pattern); `prefix`: a foreign block inside it."""
    here = _known_here(block, prefix)
    guess = nearest(name, [*here, *_known_elsewhere(block)])
    if guess is not None:
        return f"not a setting; did you mean {guess}?"
    return f"not a setting; known here: {', '.join(_ours(block, prefix) or here)}"


def _ours(block: str, prefix: str) -> tuple[str, ...]:
    where = f"{block}.{prefix}".strip(".")
    return places.names_in(where) if where in places.blocks() else ()


def _known_here(block: str, prefix: str) -> list[str]:
    """Our names at this level, then the dialects'."""
    scope, inside = _scope(block)
    inside = f"{inside}.{prefix}".strip(".")
    lead = f"{inside}." if inside else ""
    foreign = [w.removeprefix(lead).split(".")[0] for w in scope if w.startswith(lead)]
    if not lead and not block:
        foreign += [*inherited(), "data_backend_config", "data_backend", "dataset", "config"]
    return list(dict.fromkeys([*_ours(block, prefix), *foreign]))


def _known_elsewhere(block: str) -> list[str]:
    """Our settings in other blocks by their full names, the datasets' without their list when we are inside one."""
    lead = "datasets[]." if block.startswith("datasets[]") else ""
    names = [key for key in places.settings() if key.rpartition(".")[0] != block]
    near = [key.removeprefix(lead) for key in names if lead and key.startswith(lead)]
    return near + [key for key in names if not (lead and key.startswith(lead))]


def _scope(block: str) -> tuple[Iterable[str], str]:
    if block.startswith("datasets[]"):
        return dataset_rows(""), block.removeprefix("datasets[]").lstrip(".")
    return run_rows(), block


def not_a_block(name: str, value: JSON) -> str:
    inside = ", ".join(places.names_in(name)) if name in places.blocks() else "settings"
    return f"{shown(value)} is not a block; a block holds {inside}"


def from_pydantic(error: ValidationError, hints: Mapping[Place, str], known: set[Place]) -> dict[Place, Problem]:
    """The problems by place. `hints` tell how a place was written; a contradiction that rests on a value already
    `known` to be wrong is left out."""
    found: dict[Place, Problem] = {}
    for item in error.errors(include_url=False):
        if item["type"] == CONTRADICTION:
            for remark in item["ctx"]["remarks"]:
                where = _inside(item["loc"], remark.field)
                if known.isdisjoint(_inside(item["loc"], name) for name in (remark.field, *remark.also)):
                    found.setdefault(where, Problem(places.show(where), remark.message + _hint(where, hints)))
        else:
            where = _leaf(item["loc"])
            text = _wrong_value(where, item["input"], item["msg"])
            found.setdefault(where, Problem(places.show(where), text + _hint(where, hints)))
    return found


def _inside(loc: Place, path: str) -> Place:
    return (*loc, *(places.parse(path) or ()))


def _hint(where: Place, hints: Mapping[Place, str]) -> str:
    hint = hints.get(where, "")
    return f" ({hint})" if hint else ""


def _leaf(loc: Place) -> Place:
    """Pydantic's location without the names of union branches that it appends."""
    for end in range(len(loc), 0, -1):
        if places.key_at(loc[:end]) is not None:
            return loc[:end]
    return loc


def _wrong_value(where: Place, value: JSON, message: str) -> str:
    key = places.key_at(where)
    if key is None:
        return f"{shown(value)}: {message}"
    text = f"{shown(value)} is not allowed; allowed: {allowed(key.schema)}"
    if isinstance(value, str):
        guess = nearest(value, choices(key.schema))
        if guess is not None:
            return f'{text}; did you mean "{guess}"?'
        if "string" not in key.types and value.strip():
            return text + "; written without quotes" if _bare(value) else text
    if isinstance(value, int) and not isinstance(value, bool) and value == 0 and key.pattern == "datasets[].repeats":
        return text + " (SimpleTuner counts further repeats: its 0 is 1 here)"
    return text


def _bare(text: str) -> bool:
    return text.replace(".", "", 1).lstrip("+-").isdigit() or text.lower() in ("true", "false", "null")
