"""A configuration as a run keeps it, and how two of them differ. Pure: plain data in, text out."""

from __future__ import annotations

import hashlib
import json
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

    def files(self) -> dict[str, bytes]:
        """What is kept byte for byte, by the name it is kept under; the configuration itself comes first."""
        kept = {f"{GIVEN}{self.extension}": self.given}
        for number, (name, content) in enumerate(self.attachments.items(), start=1):
            kept[f"{GIVEN}.{number}.{PurePath(name).name}"] = content
        return kept

    @property
    def digest(self) -> str:
        """Two configurations with the same values have the same digest, however they were written."""
        text = json.dumps(self.resolved, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:32]


def differences(here: Mapping[str, JSON], there: Mapping[str, JSON]) -> list[str]:
    """The settings whose values differ between two configurations, one line each."""
    mine, theirs = dict(leaves(here)), dict(leaves(there))
    paths = [*mine, *(path for path in theirs if path not in mine)]
    return [
        f"{path}: {_shown(theirs, path)} there, {_shown(mine, path)} here"
        for path in paths
        if _shown(mine, path) != _shown(theirs, path)
    ]


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
