"""A configuration as a run keeps it, and how two of them differ. Pure: plain data in, text out."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from supertuner.core.types import JSON

CONFIG_FILE_STEM = "config.given"


@dataclass(frozen=True, slots=True)
class SavedConfig:
    """A configuration as a run keeps it; plain data, so that this room knows no schema."""

    file_content: bytes
    """The file as it was; empty for a configuration made in code."""
    extension: str
    """`.yaml`, `.json`, `.toml`."""
    resolved: Mapping[str, JSON]
    origins: Mapping[str, str]
    """Setting → where its value came from; one that is missing here is a default."""
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    """Further files that the configuration named and that were read as part of it, by name."""
    defaults: Mapping[str, JSON] = field(default_factory=dict)
    """Setting, list positions left out → the value that need not be said."""
    changeable: Sequence[str] = ()
    """Settings, and blocks of them, list positions left out, that may change while a run stays the same run."""

    def files(self) -> dict[str, bytes]:
        """What is kept byte for byte, by the name it is kept under; the configuration itself comes first."""
        contents = {f"{CONFIG_FILE_STEM}{self.extension}": self.file_content}
        for number, (name, content) in enumerate(self.attachments.items(), start=1):
            contents[f"{CONFIG_FILE_STEM}.{number}.{PurePath(name).name}"] = content
        return contents

    @property
    def digest(self) -> str:
        """Two configurations of one run have the same digest, however they were written."""
        text = json.dumps(self._identity_settings(self.resolved), sort_keys=True, ensure_ascii=False, allow_nan=False)
        return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:32]

    def identity_differences(self, other_resolved: Mapping[str, JSON]) -> list[str]:
        """The settings that make another run of it than the one with the resolved settings `there`, one line each."""
        return _difference_lines(
            self._identity_settings(self.resolved), self._identity_settings(other_resolved), self.defaults
        )

    def all_differences(self, other_resolved: Mapping[str, JSON]) -> list[str]:
        """The settings that are not what they are `there`, one line each; those of another run and all others."""
        return _difference_lines(
            dict(flatten_settings(self.resolved)), dict(flatten_settings(other_resolved)), self.defaults
        )

    def _identity_settings(self, resolved: Mapping[str, JSON]) -> dict[str, JSON]:
        """What decides whether it is the same run: no setting that may change, and none that need not be said."""
        return {
            path: value
            for path, value in flatten_settings(resolved)
            if not any(
                (pattern := _pattern(path)) == changeable_pattern or pattern.startswith(f"{changeable_pattern}.")
                for changeable_pattern in self.changeable
            )
            and (_pattern(path) not in self.defaults or self.defaults[_pattern(path)] != value)
        }


def _difference_lines(ours: Mapping[str, JSON], theirs: Mapping[str, JSON], defaults: Mapping[str, JSON]) -> list[str]:
    ours, theirs = _with_defaults(ours, theirs, defaults), _with_defaults(theirs, ours, defaults)
    paths = [*ours, *(path for path in theirs if path not in ours)]
    return [
        f"{path}: {_value_text(theirs, path)} there, {_value_text(ours, path)} here"
        for path in paths
        if _value_text(ours, path) != _value_text(theirs, path)
    ]


def _with_defaults(
    ours: Mapping[str, JSON], theirs: Mapping[str, JSON], defaults: Mapping[str, JSON]
) -> dict[str, JSON]:
    """`mine`, and the defaults of what only `theirs` says."""
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
