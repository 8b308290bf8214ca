"""The configuration that a run folder stores, its digest, and its differences from another one. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from supertuner.core.types import JSON, hide_tokens

CONFIG_FILE_STEM = "config.given"


@dataclass(frozen=True, slots=True)
class SavedConfig:
    """The configuration of a run, as plain data: this package does not import `config`."""

    file_content: bytes
    """The bytes of the configuration file; empty for a configuration from code."""
    extension: str
    """`.yaml`, `.json`, `.toml`."""
    resolved: Mapping[str, JSON]
    origins: Mapping[str, str]
    """Path of a setting → origin of its value; settings that are absent have their default."""
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    """Content of further files that the configuration refers to, by name."""
    defaults: Mapping[str, JSON] = field(default_factory=dict)
    """Pattern of a setting (its path without list positions) → its default."""
    changeable: Sequence[str] = ()
    """Patterns of settings and blocks that may change between sessions of one run."""

    def files(self) -> dict[str, bytes]:
        """The files to store, by name; the configuration file comes first. Tokens of the hub are removed."""
        contents = {f"{CONFIG_FILE_STEM}{self.extension}": _without_tokens(self.file_content)}
        for number, (name, content) in enumerate(self.attachments.items(), start=1):
            contents[f"{CONFIG_FILE_STEM}.{number}.{PurePath(name).name}"] = _without_tokens(content)
        return contents

    @property
    def digest(self) -> str:
        """Identifies the run: configurations that are equal, apart from changeable settings, have equal digests."""
        text = json.dumps(self._identity_settings(self.resolved), sort_keys=True, ensure_ascii=False, allow_nan=False)
        return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:32]

    def identity_differences(self, other_resolved: Mapping[str, JSON]) -> list[str]:
        """The differences from `other_resolved` that make it another run, one line each."""
        ours, theirs = self._identity_settings(self.resolved), self._identity_settings(other_resolved)
        return _difference_lines(ours, theirs, self.defaults)

    def all_differences(self, other_resolved: Mapping[str, JSON]) -> list[str]:
        """All differences from `other_resolved`, one line each."""
        ours, theirs = dict(flatten_settings(self.resolved)), dict(flatten_settings(other_resolved))
        return _difference_lines(ours, theirs, self.defaults)

    def _identity_settings(self, resolved: Mapping[str, JSON]) -> dict[str, JSON]:
        """The settings that identify the run: those that are not changeable and do not have their default."""
        settings = {}
        for path, value in flatten_settings(resolved):
            pattern = _pattern(path)
            changeable = any(pattern == block or pattern.startswith(f"{block}.") for block in self.changeable)
            if not changeable and (pattern not in self.defaults or self.defaults[pattern] != value):
                settings[path] = value
        return settings


def _without_tokens(content: bytes) -> bytes:
    return hide_tokens(content.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def _difference_lines(ours: Mapping[str, JSON], theirs: Mapping[str, JSON], defaults: Mapping[str, JSON]) -> list[str]:
    ours, theirs = _with_defaults(ours, theirs, defaults), _with_defaults(theirs, ours, defaults)
    texts = {path: (_value_text(theirs, path), _value_text(ours, path)) for path in {**ours, **theirs}}
    return [f"{path}: {there} there, {here} here" for path, (there, here) in texts.items() if there != here]


def _with_defaults(
    ours: Mapping[str, JSON], theirs: Mapping[str, JSON], defaults: Mapping[str, JSON]
) -> dict[str, JSON]:
    """`ours`, with defaults for settings that only `theirs` has."""
    missing_paths = (path for path in theirs if path not in ours and _pattern(path) in defaults)
    return {**ours, **{path: defaults[_pattern(path)] for path in missing_paths}}


def _pattern(path: str) -> str:
    """`datasets[0].id` → `datasets[].id`."""
    return re.sub(r"\[\d+\]", "[]", path)


def flatten_settings(value: JSON, path: str = "") -> Iterator[tuple[str, JSON]]:
    """Every setting as (`datasets[0].in_memory.compression`, value). A list of plain values is one setting."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flatten_settings(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, Sequence) and any(isinstance(below, Mapping) for below in value):
        for number, inner in enumerate(value):
            yield from flatten_settings(inner, f"{path}[{number}]")
    else:
        yield path, value


def _value_text(values: Mapping[str, JSON], path: str) -> str:
    return json.dumps(values[path], ensure_ascii=False) if path in values else "not set"
