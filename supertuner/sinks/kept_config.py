"""A configuration as a run keeps it, and how two of them differ. Pure: plain data in, text out."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from supertuner.core.types import JSON

GIVEN = "config.given"


@dataclass(frozen=True, slots=True)
class KeptConfig:
    """A configuration as a run keeps it; plain data, so that this room knows no schema."""

    given: bytes
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
    free: Sequence[str] = ()
    """Settings, and blocks of them, list positions left out, that may change while a run stays the same run."""

    def files(self) -> dict[str, bytes]:
        """What is kept byte for byte, by the name it is kept under; the configuration itself comes first."""
        kept = {f"{GIVEN}{self.extension}": self.given}
        for number, (name, content) in enumerate(self.attachments.items(), start=1):
            kept[f"{GIVEN}.{number}.{PurePath(name).name}"] = content
        return kept

    @property
    def digest(self) -> str:
        """Two configurations of one run have the same digest, however they were written."""
        text = json.dumps(self._identity(self.resolved), sort_keys=True, ensure_ascii=False, allow_nan=False)
        return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:32]

    def differences(self, there: Mapping[str, JSON]) -> list[str]:
        """The settings that make another run of it than the one with the resolved settings `there`, one line each."""
        return _differences(self._identity(self.resolved), self._identity(there), self.defaults)

    def changes(self, there: Mapping[str, JSON]) -> list[str]:
        """The settings that are not what they are `there`, one line each; those of another run and all others."""
        return _differences(dict(leaves(self.resolved)), dict(leaves(there)), self.defaults)

    def _identity(self, resolved: Mapping[str, JSON]) -> dict[str, JSON]:
        """What decides whether it is the same run: no setting that may change, and none that need not be said."""
        return {
            path: value
            for path, value in leaves(resolved)
            if not any((pattern := _pattern(path)) == one or pattern.startswith(f"{one}.") for one in self.free)
            and (_pattern(path) not in self.defaults or self.defaults[_pattern(path)] != value)
        }


def _differences(mine: Mapping[str, JSON], theirs: Mapping[str, JSON], defaults: Mapping[str, JSON]) -> list[str]:
    mine, theirs = _with_defaults(mine, theirs, defaults), _with_defaults(theirs, mine, defaults)
    paths = [*mine, *(path for path in theirs if path not in mine)]
    return [
        f"{path}: {_shown(theirs, path)} there, {_shown(mine, path)} here"
        for path in paths
        if _shown(mine, path) != _shown(theirs, path)
    ]


def _with_defaults(
    mine: Mapping[str, JSON], theirs: Mapping[str, JSON], defaults: Mapping[str, JSON]
) -> dict[str, JSON]:
    """`mine`, and the defaults of what only `theirs` says."""
    unsaid = (path for path in theirs if path not in mine and _pattern(path) in defaults)
    return {**mine, **{path: defaults[_pattern(path)] for path in unsaid}}


def _pattern(path: str) -> str:
    """`datasets[0].id` → `datasets[].id`."""
    return re.sub(r"\[\d+\]", "[]", path)


def leaves(value: JSON, path: str = "") -> Iterator[tuple[str, JSON]]:
    """Every setting as (`datasets[0].in_memory.compression`, value). A list of plain values is one setting."""
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from leaves(below, f"{path}.{key}" if path else key)
    elif isinstance(value, Sequence) and any(isinstance(below, Mapping) for below in value):
        for number, below in enumerate(value):
            yield from leaves(below, f"{path}[{number}]")
    else:
        yield path, value


def _shown(values: Mapping[str, JSON], path: str) -> str:
    return json.dumps(values[path], ensure_ascii=False) if path in values else "not set"
