"""Paths of settings such as `datasets[0].in_memory.compression`, as text and tuples, and the schema at each path.

A *pattern* is a path without list positions: `datasets[].in_memory.compression`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, Final, TypeAlias, Union, get_args, get_origin

from supertuner.config.settings.block import SettingsBlock
from supertuner.config.settings.run_config import RunConfig

KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys and list positions, from the root down."""

CHANGEABLE_SETTINGS: Final = (
    "checkpoints.in_background", "datasets[].in_memory.num_workers", "exports", "forecast", "loader.num_workers",
    "loader.prefetch_batches", "memory", "parallel", "plan", "report", "gh200_optimizations.enable_uvm_hints",
)  # fmt: skip
"""Patterns of settings and blocks that do not affect what is trained: where memory is, how many threads work, what is
reported. They may change between two sessions of one run. All other settings that differ from their defaults identify
the run; a setting that a later version adds does not count while it has its default."""

_PATH_STEP = re.compile(r"(?:^|\.)([^.\[\]]+)|\[(\d{1,6})\]")


@dataclass(frozen=True, slots=True)
class SettingSchema:
    """One setting that holds a value (not a block)."""

    pattern: str
    schema: Mapping[str, Any]
    """Its node of the JSON Schema, with references resolved."""

    @property
    def json_types(self) -> frozenset[str]:
        """The JSON types that it accepts."""
        return frozenset(str(node["type"]) for node in schema_alternatives(self.schema) if "type" in node)

    @property
    def is_path(self) -> bool:
        return any(node.get("format") == "path" for node in schema_alternatives(self.schema))

    def may_be_folder(self, text: str) -> bool:
        """Whether it takes a name or a folder, and `text` is not one of the words that are always names."""
        return self.schema.get("format") == "name-or-folder" and text not in self.schema["words"]


def format_path(key_path: KeyPath) -> str:
    """`("datasets", 0, "type")` → `datasets[0].type`."""
    text = ""
    for step in key_path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def parse_path(text: str) -> KeyPath | None:
    """The inverse of `format_path`; None if `text` is not a path."""
    steps: list[str | int] = []
    position = 0
    while match := _PATH_STEP.match(text, position):
        steps.append(match[1] if match[1] is not None else int(match[2]))
        position = match.end()
    return tuple(steps) if position == len(text) and steps and isinstance(steps[0], str) else None


def pattern(key_path: KeyPath) -> str:
    """`("datasets", 0, "type")` → `datasets[].type`."""
    return "".join("[]" if isinstance(step, int) else f".{step}" for step in key_path).lstrip(".")


def setting_at(key_path: KeyPath) -> SettingSchema | None:
    """The setting at `key_path`, or the setting whose list value contains `key_path`; None if there is none."""
    while key_path and isinstance(key_path[-1], int) and pattern(key_path) not in blocks():
        key_path = key_path[:-1]
    return settings().get(pattern(key_path))


def names_in_block(block: str) -> tuple[str, ...]:
    """Names of the settings and blocks directly inside the block with this pattern."""
    return tuple(blocks()[block].model_fields)


@cache
def blocks() -> Mapping[str, type[SettingsBlock]]:
    """Every block by its pattern: "" is the root, `datasets[]` an entry of that list."""
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
                schema = _resolve_reference(properties[field], root["$defs"])
                schemas[setting_pattern] = SettingSchema(setting_pattern, schema)
    return schemas


@cache
def setting_defaults() -> Mapping[str, Any]:
    """The default of each setting that has one, as JSON, by the setting's pattern."""
    return {name: setting.schema["default"] for name, setting in settings().items() if "default" in setting.schema}


def schema_alternatives(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The alternatives (`anyOf`) of a JSON Schema node; the node itself if it has none."""
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
    """The node with its `$ref` replaced by the definition. Below a block, references name simple types only."""
    reference = str(node.get("$ref", "")).rpartition("/")[2]
    return {**definitions.get(reference, {}), **{name: value for name, value in node.items() if name != "$ref"}}
