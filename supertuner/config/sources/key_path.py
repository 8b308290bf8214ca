"""Where a setting stands: `datasets[0].in_memory.compression` as text and as a tuple, and what the tree says of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin

from supertuner.config.settings.block import SettingsBlock
from supertuner.config.settings.run_config import RunConfig

KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys and list positions from the root down."""

_PATH_STEP = re.compile(r"(?:^|\.)([^.\[\]]+)|\[(\d{1,6})\]")


@dataclass(frozen=True, slots=True)
class SettingSchema:
    """One setting that holds a value (not a block)."""

    pattern: str
    """Its place with list positions left out: `datasets[].in_memory.compression`."""
    schema: Mapping[str, Any]
    """Its node of the JSON Schema, references resolved."""

    @property
    def pending_reader(self) -> str:
        """Who will read it, if nothing does yet."""
        return str(self.schema.get("pending", ""))

    @property
    def json_types(self) -> frozenset[str]:
        """JSON types it accepts."""
        return frozenset(str(node["type"]) for node in schema_alternatives(self.schema) if "type" in node)

    @property
    def is_path(self) -> bool:
        return any(node.get("format") == "path" for node in schema_alternatives(self.schema))

    def may_be_folder(self, text: str) -> bool:
        """It takes a folder or a name, and the text is none of the words that always are names."""
        return self.schema.get("format") == "name-or-folder" and text not in self.schema["words"]


def format_path(key_path: KeyPath) -> str:
    """`("datasets", 0, "type")` → `datasets[0].type`."""
    text = ""
    for step in key_path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def parse_path(text: str) -> KeyPath | None:
    """The inverse of `show`; None if the text is no place."""
    steps: list[str | int] = []
    position = 0
    while position < len(text):
        match = _PATH_STEP.match(text, position)
        if match is None:
            return None
        steps.append(match[1] if match[1] is not None else int(match[2]))
        position = match.end()
    return tuple(steps) if steps and isinstance(steps[0], str) else None


def pattern(key_path: KeyPath) -> str:
    return "".join("[]" if isinstance(s, int) else f".{s}" for s in key_path).lstrip(".")


def setting_at(key_path: KeyPath) -> SettingSchema | None:
    """The setting at `place`, or the one whose list `place` points into."""
    while key_path and isinstance(key_path[-1], int) and pattern(key_path) not in blocks():
        key_path = key_path[:-1]
    return settings().get(pattern(key_path))


def names_in_block(block: str) -> tuple[str, ...]:
    """Names of the settings and blocks directly inside the block with this pattern."""
    return tuple(blocks()[block].model_fields)


@cache
def blocks() -> Mapping[str, type[SettingsBlock]]:
    """Every block by its pattern; the root is the empty one, `datasets[]` one entry of that list."""
    return dict(_blocks_below("", RunConfig))


@cache
def settings() -> Mapping[str, SettingSchema]:
    """Every setting by its pattern."""
    root = RunConfig.model_json_schema()
    schemas = {}
    for name, block in blocks().items():
        properties = root["properties"] if block is RunConfig else root["$defs"][block.__name__]["properties"]
        for field in block.model_fields:
            setting_pattern = f"{name}.{field}".lstrip(".")
            if setting_pattern not in blocks() and f"{setting_pattern}[]" not in blocks():
                schemas[setting_pattern] = SettingSchema(
                    setting_pattern, _resolve_reference(properties[field], root["$defs"])
                )
    return schemas


def schema_alternatives(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The alternatives of a JSON Schema node; itself if it has none."""
    return tuple(schema["anyOf"]) if "anyOf" in schema else (schema,)


def _blocks_below(block_pattern: str, block: type[SettingsBlock]) -> Iterator[tuple[str, type[SettingsBlock]]]:
    yield block_pattern, block
    for field, info in block.model_fields.items():
        inner_pattern = f"{block_pattern}.{field}".lstrip(".")
        inner: Any = info.annotation
        if get_origin(inner) is tuple and _is_block(get_args(inner)[0]):
            yield from _blocks_below(f"{inner_pattern}[]", get_args(inner)[0])
        elif _is_block(inner):
            yield from _blocks_below(inner_pattern, inner)


def _is_block(annotation: Any) -> bool:
    assert get_origin(annotation) not in (Union, UnionType) or not any(map(_is_block, get_args(annotation)))
    return isinstance(annotation, type) and issubclass(annotation, SettingsBlock)


def _resolve_reference(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The node with `$ref` replaced by what it names; only simple types are referred to below a block."""
    flat = dict(node)
    if "$ref" in flat:
        flat = {**definitions[str(flat.pop("$ref")).rsplit("/", 1)[1]], **flat}
    return flat
