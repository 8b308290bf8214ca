"""Where a model's files are on this machine, and what its config files say; weights are not opened here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from supertuner.core.errors import ModelError
from supertuner.models.spec import Source


def folder_of(source: Source, parts: Sequence[str]) -> Path:
    """The folder of the pipeline, with these parts in it."""
    return Path(source.path)


def read_configs(source: Source) -> Mapping[str, Mapping[str, Any]]:
    """The pipeline's index as `""`, and each part's config by its name."""
    folder = folder_of(source, ())
    index = _json(folder / "model_index.json")
    configs: dict[str, Mapping[str, Any]] = {"": index}
    for part, named in index.items():
        if isinstance(named, list) and named and named[0] is not None:
            configs[part] = _config(folder / part)
    return configs


def files_of(source: Source, parts: Sequence[str]) -> tuple[Path, ...]:
    """Every file of these parts that is read: configs, weights, vocabularies."""
    folder = folder_of(source, parts)
    return tuple(
        sorted(
            file
            for part in parts
            for file in (folder / part).iterdir()
            if file.suffix in (".json", ".safetensors", ".txt", ".model", ".jinja")
        )
    )


def _config(folder: Path) -> Mapping[str, Any]:
    for name in ("config.json", "scheduler_config.json", "tokenizer_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            return _json(folder / name)
    raise ModelError(f"{folder} has no config")


def _json(file: Path) -> Mapping[str, Any]:
    read = json.loads(file.read_bytes())
    assert isinstance(read, dict)
    return read
