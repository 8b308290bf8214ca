"""Messages for problems of a configuration: the setting, its value, the allowed values, and the closest known key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from supertuner.config.dialects.key_tables import dataset_keys, inherited_keys, run_keys
from supertuner.config.settings import key_paths
from supertuner.config.settings.block import CONTRADICTION
from supertuner.config.settings.key_paths import KeyPath
from supertuner.config.settings.values import allowed_choices, allowed_text, format_value
from supertuner.core.errors import ConfigProblem
from supertuner.core.types import JSON


def edit_distance(a: str, b: str) -> int:
    """The Damerau-Levenshtein distance (optimal string alignment): the fewest insertions, deletions, replacements and
    swaps of adjacent letters that turn `a` into `b`."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, last, row = row, before, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], last[j - 2] + 1)
    return row[-1]


def closest_match(word: str, candidates: Sequence[str]) -> str | None:
    """The candidate with the smallest edit distance, the first of equals; None if that exceeds a third of the length of
    `word`.

    Only the last part of a candidate, after the last dot, is compared.
    """
    normalized = word.lower().replace("-", "_")
    limit, closest = max(1, len(normalized) // 3), None
    for candidate in candidates:
        name = candidate.rsplit(".", 1)[-1].lower()
        if letter_difference(normalized, name) <= limit and (distance := edit_distance(normalized, name)) <= limit:
            closest, limit = candidate, distance - 1  # a later candidate must be strictly closer
    return closest


def letter_difference(a: str, b: str) -> int:
    """A lower bound of `edit_distance` that is cheap to compute: the letters that only one of the words has."""
    if a == b:
        return 0
    letters_a, letters_b = Counter(a), Counter(b)
    return max((letters_a - letters_b).total(), (letters_b - letters_a).total())


def unknown_key_message(name: str, block: str, prefix: str = "") -> str:
    """The message for an unknown key in the block with pattern `block`, or in a dialect's block `prefix` inside it."""
    known_keys = _known_keys_in(block, prefix)
    suggestion = closest_match(name, [*known_keys, *_known_keys_elsewhere(block)])
    if suggestion is not None:
        return f"not a setting; did you mean {suggestion}?"
    return f"not a setting; known here: {', '.join(_canonical_names(block, prefix) or known_keys)}"


def _canonical_names(block: str, prefix: str) -> tuple[str, ...]:
    block_pattern = f"{block}.{prefix}".strip(".")
    return key_paths.names_in_block(block_pattern) if block_pattern in key_paths.blocks() else ()


def _known_keys_in(block: str, prefix: str) -> list[str]:
    """The names in this block: ours, then those of the dialects."""
    dialect_keys = dataset_keys("") if block.startswith("datasets[]") else run_keys()
    dialect_path = f"{block.removeprefix('datasets[]')}.{prefix}".strip(".")
    path_prefix = f"{dialect_path}." if dialect_path else ""
    foreign_names = [w.removeprefix(path_prefix).split(".")[0] for w in dialect_keys if w.startswith(path_prefix)]
    if not path_prefix and not block:
        foreign_names += [*inherited_keys(), "data_backend_config", "data_backend", "dataset", "config"]
    return list(dict.fromkeys([*_canonical_names(block, prefix), *foreign_names]))


def _known_keys_elsewhere(block: str) -> list[str]:
    """Our settings in other blocks, by their full names; inside a dataset, settings of datasets come first and without
    `datasets[].`."""
    names = [key for key in key_paths.settings() if key.rpartition(".")[0] != block]
    if not block.startswith("datasets[]"):
        return names
    of_datasets = [key for key in names if key.startswith("datasets[].")]
    return [key.removeprefix("datasets[].") for key in of_datasets] + [key for key in names if key not in of_datasets]


def not_a_block_message(name: str, value: JSON) -> str:
    contents = ", ".join(key_paths.names_in_block(name)) if name in key_paths.blocks() else "settings"
    return f"{format_value(value)} is not a block; a block holds {contents}"


def problems_from_pydantic(
    error: ValidationError, hints: Mapping[KeyPath, str], wrong_paths: set[KeyPath]
) -> dict[KeyPath, ConfigProblem]:
    """The problems by key path. `hints` are appended to the message of their path. A contradiction that involves one
    of `wrong_paths`, values already known to be invalid, is left out."""
    messages: dict[KeyPath, str] = {}
    for item in error.errors(include_url=False):
        if item["type"] == CONTRADICTION:
            for issue in item["ctx"]["remarks"]:
                fields = (issue.field, *issue.related_fields)
                paths = [(*item["loc"], *(key_paths.parse_path(field) or ())) for field in fields]
                if wrong_paths.isdisjoint(paths):
                    messages.setdefault(paths[0], issue.message)
        else:
            key_path = _without_union_branches(item["loc"])
            messages.setdefault(key_path, _wrong_value_message(key_path, item["input"], item["msg"]))
    return {
        key_path: ConfigProblem(key_paths.format_path(key_path), f"{message} ({hint})" if hint else message)
        for key_path, message in messages.items()
        for hint in [hints.get(key_path)]
    }


def _without_union_branches(loc: KeyPath) -> KeyPath:
    """Pydantic's location of an error without the names of union branches that it appends."""
    for end in range(len(loc), 0, -1):
        if key_paths.setting_at(loc[:end]) is not None:
            return loc[:end]
    return loc


def _wrong_value_message(key_path: KeyPath, value: JSON, message: str) -> str:
    setting = key_paths.setting_at(key_path)
    if setting is None:
        return f"{format_value(value)}: {message}"
    text = f"{format_value(value)} is not allowed; allowed: {allowed_text(setting.schema)}"
    if isinstance(value, str):
        suggestion = closest_match(value, allowed_choices(setting.schema))
        if suggestion is not None:
            return f'{text}; did you mean "{suggestion}"?'
        if "string" not in setting.json_types and value.strip():
            return text + "; write it without quotes" if _is_unquoted_literal(value) else text
    if type(value) is int and value == 0 and setting.pattern == "datasets[].repeats":
        return text + " (SimpleTuner counts additional repeats: its 0 is 1 here)"
    return text


def _is_unquoted_literal(text: str) -> bool:
    return text.replace(".", "", 1).lstrip("+-").isdigit() or text.lower() in ("true", "false", "null")
