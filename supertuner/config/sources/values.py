"""What a value is, in words, and how text from the environment or --set becomes one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from supertuner.config.sources.key_path import Key, alternatives
from supertuner.core.types import JSON

_TRUE = frozenset(("1", "true", "yes", "on"))
_FALSE = frozenset(("0", "false", "no", "off"))


def shown(value: JSON) -> str:
    """The value as JSON, short enough for a line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "…"


def from_text(text: str) -> JSON:
    """JSON if the text is JSON, else the text itself."""
    try:
        value: JSON = json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and not math.isfinite(value):
        return text
    return text if isinstance(value, int) and abs(value) >= 1 << 63 else value


def fitted(value: JSON, text: str, key: Key) -> JSON:
    """`value`, which was written as the text `text`, as the kind of value that `key` takes, if it can be one.

    A name may look like a number, and shells and command lines write booleans in their own way.
    """
    if "boolean" in key.types and text.strip().lower() in _TRUE | _FALSE and not key.types & {"integer", "number"}:
        return text.strip().lower() in _TRUE
    if isinstance(value, str):
        return _number(value, key)
    fits = isinstance(value, bool) and "boolean" in key.types
    fits |= isinstance(value, int | float) and not isinstance(value, bool) and bool(key.types & {"integer", "number"})
    fits |= value is None and "null" in key.types
    fits |= isinstance(value, list | dict)
    return text if not fits and "string" in key.types else value


def _number(text: str, key: Key) -> JSON:
    """`.5` and `+3` are numbers to people, though not to JSON."""
    if not key.types & {"integer", "number"}:
        return text
    try:
        return int(text) if key.types.isdisjoint({"number"}) else _finite(float(text), text)
    except ValueError:
        return text


def _finite(number: float, text: str) -> JSON:
    return number if math.isfinite(number) else text


def _not_json(text: str) -> Any:
    raise ValueError(text)


def allowed(schema: Mapping[str, Any]) -> str:
    """What a setting takes, in words: `a whole number of at least 1`."""
    if "allowed" in schema:
        return str(schema["allowed"])
    nodes = alternatives(schema)
    words = [_allowed_one(node) for node in nodes if node.get("type") != "array" or node["items"] not in nodes]
    several = ["a list of them"] if any(node.get("type") == "array" for node in nodes) else []
    return " or ".join(dict.fromkeys([*words, *several]))


def choices(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts that a setting takes, if it takes only some."""
    found: list[str] = []
    for node in alternatives(schema):
        found += [str(value) for value in node.get("enum", [node["const"]] if "const" in node else [])]
    return tuple(found)


def _allowed_one(node: Mapping[str, Any]) -> str:
    if "enum" in node:
        return "one of " + ", ".join(shown(value) for value in node["enum"])
    if "const" in node:
        return shown(node["const"])
    if node.get("type") in ("integer", "number"):
        return ("a whole number" if node["type"] == "integer" else "a number") + _bounds(node)
    if node.get("type") == "array":
        return (
            "a list of " + _allowed_one(node["items"]).removeprefix("a ") + ("s" if "enum" not in node["items"] else "")
        )
    names = {"boolean": "true or false", "null": "null", "object": "a block"}
    return names.get(str(node.get("type")), "a path in quotes" if node.get("format") == "path" else "text in quotes")


def _bounds(node: Mapping[str, Any]) -> str:
    if "minimum" in node and "maximum" in node:
        return f" from {_plain(node['minimum'])} to {_plain(node['maximum'])}"
    words = {
        "minimum": "of at least",
        "exclusiveMinimum": "above",
        "maximum": "of at most",
        "exclusiveMaximum": "below",
    }
    return "".join(f" {words[name]} {_plain(node[name])}" for name in words if name in node)


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)
