"""Formats values and the types that settings accept, and converts text from --set and the environment to values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from typing import Any

from supertuner.config.settings.key_paths import SettingSchema, schema_alternatives
from supertuner.core.types import JSON, hide_tokens

_TRUE = frozenset(("1", "true", "yes", "on"))
_FALSE = frozenset(("0", "false", "no", "off"))


def format_value(value: JSON) -> str:
    """The value as JSON, shortened to at most 60 characters."""
    text = hide_tokens(json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= 60 else text[:57] + "…"


def parse_text(text: str) -> JSON:
    """The value if `text` is JSON, else `text` itself. Numbers that are infinite or exceed 64 bits stay text."""
    try:
        value: JSON = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and not math.isfinite(value):
        return text
    return text if isinstance(value, int) and abs(value) >= 1 << 63 else value


def coerce_text(value: JSON, text: str, setting: SettingSchema) -> JSON:
    """Convert `value`, parsed from `text`, to a type that the setting accepts; unchanged if that is not possible.

    A setting of text gets `text` itself, even if it looks like a number; booleans may be written as `yes` or `off`.
    """
    types, word = setting.json_types, text.strip().lower()
    is_number = bool(types & {"integer", "number"})
    if "boolean" in types and not is_number and word in _TRUE | _FALSE:
        return word in _TRUE
    if isinstance(value, str):
        return _coerce_number(value, types) if is_number else value
    if isinstance(value, bool):
        fits = "boolean" in types
    elif value is None:
        fits = "null" in types
    else:
        fits = is_number or isinstance(value, list | dict)
    return text if not fits and "string" in types else value


def _coerce_number(text: str, types: Set[str]) -> JSON:
    """The number in `text`, including forms that JSON does not have, such as `.5` and `+3`; else `text`."""
    try:
        number = float(text) if "number" in types else int(text)
    except ValueError:
        return text
    return text if isinstance(number, float) and not math.isfinite(number) else number


def _refuse_constant(text: str) -> Any:
    raise ValueError(text)


def allowed_text(schema: Mapping[str, Any]) -> str:
    """The values that a setting accepts, for messages: `a whole number of at least 1`."""
    if "allowed" in schema:
        return str(schema["allowed"])
    nodes = schema_alternatives(schema)
    words = [_allowed_text_of_node(node) for node in nodes if node.get("type") != "array" or node["items"] not in nodes]
    several = ["a list of them"] if any(node.get("type") == "array" for node in nodes) else []
    return " or ".join(dict.fromkeys([*words, *several]))


def allowed_choices(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts that a setting accepts, if it accepts only certain texts."""
    texts: list[str] = []
    for node in schema_alternatives(schema):
        texts += [str(value) for value in node.get("enum", [node["const"]] if "const" in node else [])]
    return tuple(texts)


def _allowed_text_of_node(node: Mapping[str, Any]) -> str:
    if "enum" in node:
        return "one of " + ", ".join(format_value(value) for value in node["enum"])
    if "const" in node:
        return format_value(node["const"])
    if node.get("type") in ("integer", "number"):
        return ("a whole number" if node["type"] == "integer" else "a number") + _bounds_text(node)
    if node.get("type") == "array":
        plural = "" if "enum" in node["items"] else "s"
        return f"a list of {_allowed_text_of_node(node['items']).removeprefix('a ')}{plural}"
    names = {"boolean": "true or false", "null": "null", "object": "a block"}
    return names.get(str(node.get("type")), "a path in quotes" if node.get("format") == "path" else "text in quotes")


def _bounds_text(node: Mapping[str, Any]) -> str:
    if "minimum" in node and "maximum" in node:
        return f" from {_number_text(node['minimum'])} to {_number_text(node['maximum'])}"
    words = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "of at most"}
    words["exclusiveMaximum"] = "below"
    return "".join(f" {words[name]} {_number_text(node[name])}" for name in words if name in node)


def _number_text(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)
