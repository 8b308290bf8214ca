"""`--set path=value` and calls from code: one value each, applied above the file in the order given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from supertuner.config.dialects.translate import Translation
from supertuner.config.sources import key_path as places
from supertuner.config.sources.parse import Unreadable, check_plain
from supertuner.config.sources.provenance import Layer, Source
from supertuner.config.sources.values import from_text
from supertuner.core.errors import Problem


def from_set(text: str, folder: Path) -> Layer:
    """The layer of one `--set`. The value is JSON if it reads as JSON, else text."""
    path, equals, value = text.partition("=")
    where = places.parse(path.strip())
    if not equals or where is None:
        form = "write path=value, for example train.batch_size=4 or datasets[0].type=disk"
        return Layer(problems=[Problem(f"--set {text}", f"not understood; {form}")])
    read = from_text(value)
    structured = isinstance(read, list | dict)
    return _layer(Source(f"--set {text}", folder, False, not structured), where, read if structured else value)


def from_code(path: str, value: Any, folder: Path) -> Layer:
    """The layer of one override given by code; the value counts as it is."""
    where = places.parse(path)
    if where is None:
        return Layer(problems=[Problem(f"code: {path}", "not the path of a setting")])
    return _layer(Source("code", folder, False), where, _plain(value))


def _layer(source: Source, where: places.Place, value: Any) -> Layer:
    try:
        check_plain(value)
    except Unreadable as error:
        return Layer(problems=[Problem(source.name, str(error))])
    return Translation(source).at(where, value)


def _plain(value: Any) -> Any:
    """Code may give paths and tuples; files have text and lists."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
