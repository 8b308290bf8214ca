"""What a checked configuration becomes on this machine: names filled in, impossible sizes lowered, doubts told."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from supertuner.config.settings.block import Block
from supertuner.config.settings.data import Dataset
from supertuner.config.settings.tree import RunConfig
from supertuner.config.sources import key_path as places
from supertuner.config.sources.key_path import Place
from supertuner.config.sources.provenance import Given
from supertuner.config.sources.values import shown
from supertuner.core.errors import Problem
from supertuner.core.events import Warned
from supertuner.core.host import Host
from supertuner.core.types import GIB


def absolute(given: Mapping[Place, Given]) -> dict[Place, Given]:
    """The same values with paths made absolute, each from the folder of the source that gave it."""
    return {where: _absolute(where, one) for where, one in given.items()}


def _absolute(where: Place, given: Given) -> Given:
    key = places.key_at(where)
    if key is None or not isinstance(given.value, str) or not given.value:
        return given
    path = Path(os.path.expanduser(given.value))
    looks_like_path = given.value.startswith(("./", "../", "/", "~"))
    folder = key.may_be_folder(given.value) and (looks_like_path or os.path.isdir(given.source.folder / path))
    if not (key.is_path or folder):
        return given
    # lexical, so that a link in the path stays a link
    return replace(given, value=_normal(given.source.folder / path), was_relative=not path.is_absolute())


def _normal(path: Path) -> str:
    parts: list[str] = []
    for part in path.absolute().parts:
        if part == ".." and len(parts) > 1:
            parts.pop()
        elif part != "..":
            parts.append(part)
    return str(Path(*parts))


def missing_paths(given: Mapping[Place, Given], found: Mapping[Place, Given]) -> Iterator[Problem]:
    """Datasets and models that are not there. `given` as written, `found` with absolute paths."""
    for where, one in found.items():
        if not isinstance(one.value, str) or not one.value:
            continue
        missing = _missing(where, one.value)
        if missing:
            hint = f" ({one.hint()})" if one.hint() else ""
            text = f"{shown(given[where].value)} is not {missing}{_looked(one, given[where])}{hint}"
            yield Problem(places.show(where), text)


def _missing(where: Place, path: str) -> str:
    """What should be at `path` and is not; "" if it is there, or if nothing is known to have to be there."""
    name = where[-1]
    is_file = os.path.isfile(path)
    if name == "metadata_file":
        return "" if is_file else "a file"
    if name == "instance_data_dir" and not (is_file and path.endswith(".tar")) and not os.path.isdir(path):
        return "a folder or a .tar file" if is_file else "a folder"
    if name in ("single_file", "single_file_low_noise") and not (is_file and path.endswith(".safetensors")):
        return "a .safetensors file"
    if where == ("model", "path") and path.startswith("/") and not os.path.isdir(path):
        return "a folder with a pipeline; a single file is given by model.single_file" if is_file else "a folder"
    return ""


def _looked(found: Given, given: Given) -> str:
    if found.value == given.value:
        return ""
    return f" (looked in the folder of {found.source.name})" if found.source.is_file else f" (looked for {found.value})"


def resolved(config: RunConfig, host: Host) -> tuple[RunConfig, list[Warned], dict[Place, str]]:
    """The configuration as this machine can have it, what to tell the user, and which values were changed and how."""
    notes: list[Warned] = []
    changed: dict[Place, str] = {}
    datasets = []
    total = host.memory_total()
    names = _ids(config.datasets)
    for index, dataset in enumerate(config.datasets):
        update: dict[str, Any] = {"id": names[index]}
        most = _most_memory(dataset, total)
        if most is not None:
            where: Place = ("datasets", index, "in_memory", "memory_limit_gb")
            limit = dataset.in_memory.memory_limit_gb
            changed[where] = f"{limit:g} is more than this machine has; lowered to {most:g}"
            notes.append(Warned(places.show(where), changed[where]))
            update["in_memory"] = dataset.in_memory.model_copy(update={"memory_limit_gb": most})
        if dataset.instance_data_dir is None:
            notes.append(Warned(f"datasets[{index}]", "names no instance_data_dir: there is nothing to stage"))
        datasets.append(dataset.model_copy(update=update))
    run = config.run.model_copy(update={"output_dir": config.run.output_dir.absolute()})
    return config.model_copy(update={"datasets": tuple(datasets), "run": run}), notes, changed


def _most_memory(dataset: Dataset, total: int | None) -> float | None:
    """What the limit must be lowered to, if it is above what this machine has."""
    limit = dataset.in_memory.memory_limit_gb
    if limit is None or total is None or limit * GIB <= total:
        return None
    return math.floor(total / GIB * 100) / 100


def _ids(datasets: tuple[Dataset, ...]) -> list[str]:
    """An id for each dataset: its own, or its folder's name, made unique by a number."""
    taken = {dataset.id for dataset in datasets if dataset.id}
    names = []
    for index, dataset in enumerate(datasets):
        folder = dataset.instance_data_dir.stem if dataset.instance_data_dir else ""
        name = base = dataset.id or re.sub(r"[^A-Za-z0-9._-]+", "-", folder).strip("-._") or f"dataset-{index}"
        number = 2
        while not dataset.id and name in taken:
            name, number = f"{base}-{number}", number + 1
        taken.add(name)
        names.append(name)
    return names


def doubts(block: Block, at: Place = ()) -> Iterator[Warned]:
    """What the blocks find unwise, with the place of each."""
    for remark in block.doubts():
        yield Warned(places.show((*at, *(places.parse(remark.field) or ()))), remark.message)
    for name in type(block).model_fields:
        inner = getattr(block, name)
        if isinstance(inner, Block):
            yield from doubts(inner, (*at, name))
        elif isinstance(inner, tuple):
            for index, entry in enumerate(inner):
                if isinstance(entry, Block):
                    yield from doubts(entry, (*at, name, index))


def pending(given: Mapping[Place, Given]) -> Iterator[Warned]:
    """Settings that were given and that nothing reads yet."""
    for where in given:
        key = places.key_at(where)
        if key is not None and key.pending:
            yield Warned(places.show(where), f"accepted; nothing reads it until {key.pending} lands")
