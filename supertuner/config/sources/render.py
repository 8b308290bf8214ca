"""Writes settings under our own names as JSON, YAML or TOML; the text loads as the same values."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeGuard

import yaml

from supertuner.config.settings import key_paths
from supertuner.config.settings.key_paths import KeyPath
from supertuner.config.sources.provenance import Provenance, build_tree
from supertuner.core.types import JSON

ConfigLanguage: TypeAlias = Literal["json", "yaml", "toml"]
_BARE_YAML = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_YAML_WORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null", "none"])


def canonical_tree(values: Mapping[KeyPath, Provenance], folder: Path) -> dict[str, JSON]:
    """The settings from files and --set as a tree, under our names, in the order of our fields, with paths relative to
    `folder`. Settings from the environment are left out."""
    written_values = {
        key_path: _relative_to_folder(key_path, provenance, folder)
        for key_path, provenance in values.items()
        if not provenance.source.name.startswith("environment")
    }
    tree, gaps = build_tree(written_values)
    assert not gaps, gaps
    ordered = _in_field_order(tree, "")
    assert isinstance(ordered, dict)
    return ordered


def render_tree(tree: Mapping[str, JSON], language: ConfigLanguage) -> str:
    writers: dict[ConfigLanguage, Callable[[Mapping[str, JSON]], str]] = {"json": _json, "yaml": _yaml, "toml": _toml}
    return writers[language](tree)


def _relative_to_folder(key_path: KeyPath, provenance: Provenance, folder: Path) -> Provenance:
    """A path that was relative in its source, relative to `folder`; a dataset in the hub's cache by its name on the
    hub; other values unchanged."""
    if provenance.hub_name:
        return replace(provenance, value=provenance.hub_name)
    if not provenance.was_relative:
        return provenance
    path = os.path.relpath(str(provenance.value), folder)
    setting = key_paths.setting_at(key_path)
    may_be_name = setting is not None and not setting.is_path and not path.startswith("..")
    return replace(provenance, value=f"./{path}" if may_be_name else path)


def _in_field_order(node: JSON, block: str) -> JSON:
    """`node` with its keys in the order of the fields of RunConfig."""
    if isinstance(node, list):
        return [_in_field_order(inner, f"{block}[]") for inner in node]
    if not isinstance(node, dict) or block not in key_paths.blocks():
        return node
    names = [name for name in key_paths.names_in_block(block) if name in node]
    return {name: _in_field_order(node[name], f"{block}.{name}".lstrip(".")) for name in names}


def _json(tree: Mapping[str, JSON]) -> str:
    return json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    bare = _BARE_YAML.fullmatch(text) and text.lower() not in _YAML_WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if bare else '"')


class _QuotingDumper(yaml.SafeDumper):
    """Quotes every text that a YAML 1.1 or 1.2 parser might read as another type."""

    yaml_representers: ClassVar[dict[Any, Any]] = {**yaml.SafeDumper.yaml_representers, str: _represent_text}

    def ignore_aliases(self, data: object) -> bool:
        return True


def _yaml(tree: Mapping[str, JSON]) -> str:
    return yaml.dump(dict(tree), Dumper=_QuotingDumper, sort_keys=False, allow_unicode=True, width=1000)


def _toml(tree: Mapping[str, JSON]) -> str:
    """TOML has no null, so nulls are left out. The meaning is the same: a setting that accepts null defaults to it."""
    lines: list[str] = []
    _toml_table(_without_nulls(tree), "", lines)
    return "\n".join(lines).strip("\n") + "\n"


def _without_nulls(table: Mapping[str, JSON]) -> dict[str, JSON]:
    """`table` without nulls and without blocks that hold only nulls. Empty list entries stay, as positions count."""
    result: dict[str, JSON] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            value = _without_nulls(value) or None
        elif _is_list_of_tables(value):
            value = [_without_nulls(entry) for entry in value]
        if value is not None:
            result[name] = value
    return result


def _toml_table(table: Mapping[str, JSON], name: str, lines: list[str]) -> None:
    inner = {k: v for k, v in table.items() if isinstance(v, Mapping) or _is_list_of_tables(v)}
    for key, value in table.items():
        if key not in inner:
            lines.append(f"{key} = {_toml_value(value)}")
    for key, value in inner.items():
        path = f"{name}.{key}".lstrip(".")
        if isinstance(value, Mapping):
            lines += ["", f"[{path}]"]
            _toml_table(value, path, lines)
        elif isinstance(value, list):
            for entry in value:
                lines += ["", f"[[{path}]]"]
                _toml_table(entry, path, lines)


def _is_list_of_tables(value: JSON) -> TypeGuard[list[Mapping[str, JSON]]]:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, Mapping) for entry in value)


def _toml_value(value: JSON) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
