"""Adapts settings to this machine: makes paths absolute, names datasets, lowers memory limits, collects warnings."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from supertuner.config.settings import key_paths
from supertuner.config.settings.block import SettingsBlock
from supertuner.config.settings.data import DatasetSettings
from supertuner.config.settings.key_paths import KeyPath
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.settings.values import format_value
from supertuner.config.sources.hub_datasets import hub_snapshot, missing_snapshot_message
from supertuner.config.sources.provenance import Provenance
from supertuner.core.errors import ConfigProblem
from supertuner.core.events import WarningEvent
from supertuner.core.host import HostFacts
from supertuner.core.types import GIB

WRITTEN_FOLDERS = ("output_dir", "cache_dir", "home", "disk_home")
"""Settings with folders that a run creates; all other paths are read."""


def resolve_paths(
    values: Mapping[KeyPath, Provenance], environ: Mapping[str, str] | None = None
) -> dict[KeyPath, Provenance]:
    """The same values with absolute paths.

    A relative path is resolved from the folder of its source. If something to read is not there, but is in the working
    folder, from which SimpleTuner and ai-toolkit resolve paths, that is used.
    """
    return {key_path: _resolve_path(key_path, provenance, environ or {}) for key_path, provenance in values.items()}


def _resolve_path(key_path: KeyPath, provenance: Provenance, environ: Mapping[str, str]) -> Provenance:
    setting = key_paths.setting_at(key_path)
    if setting is None or not isinstance(provenance.value, str) or not provenance.value:
        return provenance
    if key_path[-1] == "instance_data_dir" and (snapshot := hub_snapshot(provenance.value, environ)):
        return replace(provenance, value=str(snapshot), hub_name=provenance.value)
    path = Path(os.path.expanduser(provenance.value))
    looks_like_path = provenance.value.startswith(("./", "../", "/", "~"))
    is_folder = setting.may_be_folder(provenance.value) and (
        looks_like_path or os.path.isdir(provenance.source.folder / path)
    )
    if not (setting.is_path or is_folder):
        return provenance
    folder = provenance.source.folder
    is_read = str(key_path[-1]) not in WRITTEN_FOLDERS
    if is_read and not path.is_absolute() and not os.path.lexists(folder / path) and os.path.lexists(path):
        folder = Path.cwd()
    # without resolving symbolic links
    return replace(provenance, value=_normalize_path(folder / path), was_relative=not path.is_absolute())


def _normalize_path(path: Path) -> str:
    parts: list[str] = []
    for part in path.absolute().parts:
        if part == ".." and len(parts) > 1:
            parts.pop()
        elif part != "..":
            parts.append(part)
    return str(Path(*parts))


def missing_paths(
    written_values: Mapping[KeyPath, Provenance], resolved_values: Mapping[KeyPath, Provenance]
) -> Iterator[ConfigProblem]:
    """A problem for each dataset or model that does not exist. `resolved_values` have absolute paths."""
    for key_path, provenance in resolved_values.items():
        if not isinstance(provenance.value, str) or not provenance.value:
            continue
        missing_kind = _missing_kind(key_path, provenance.value)
        if missing_kind:
            hint = f" ({provenance.error_hint()})" if provenance.error_hint() else ""
            written = written_values[key_path]
            text = f"{format_value(written.value)} is not {missing_kind}{_searched_hint(provenance, written)}{hint}"
            if provenance.hub_name:
                text = f"{missing_snapshot_message(provenance.hub_name)}{hint}"
            yield ConfigProblem(key_paths.format_path(key_path), text)


def _missing_kind(key_path: KeyPath, path: str) -> str:
    """What must exist at `path` and does not, for example "a folder"; "" if it exists or is not required."""
    name = key_path[-1]
    is_file = os.path.isfile(path)
    if name == "metadata_file" or key_path == ("validation", "image"):
        return "" if is_file else "a file"
    if name == "instance_data_dir" and not (is_file and path.endswith(".tar")) and not os.path.isdir(path):
        return "a folder or a .tar file" if is_file else "a folder"
    if str(name).startswith("single_file") and not (is_file and path.endswith(".safetensors")):
        return "a .safetensors file"
    if key_path == ("model", "path") and path.startswith("/") and not os.path.isdir(path):
        return "a folder with a pipeline; set model.single_file to use a single file" if is_file else "a folder"
    return ""


def _searched_hint(resolved: Provenance, written: Provenance) -> str:
    if resolved.value == written.value:
        return ""
    if not resolved.source.is_file:
        return f" (looked for {resolved.value})"
    folders = dict.fromkeys((str(resolved.source.folder), str(Path.cwd())))
    if len(folders) == 1:
        return f" (looked in the folder of {resolved.source.name})"
    return f" (looked in the folder of {resolved.source.name} and in the working folder {Path.cwd()})"


def resolve_for_host(config: RunConfig, host: HostFacts) -> tuple[RunConfig, list[WarningEvent], dict[KeyPath, str]]:
    """Adapt the configuration to this machine. Returns it, warnings, and for each changed setting how it changed."""
    warnings: list[WarningEvent] = []
    changed: dict[KeyPath, str] = {}
    datasets = []
    total = host.memory_total()
    names = _dataset_ids(config.datasets)
    for index, dataset in enumerate(config.datasets):
        update: dict[str, Any] = {"id": names[index]}
        lowered_limit = _lowered_memory_limit(dataset, total)
        if lowered_limit is not None:
            key_path: KeyPath = ("datasets", index, "in_memory", "memory_limit_gb")
            limit = dataset.in_memory.memory_limit_gb
            changed[key_path] = f"{limit:g} is more than this machine has; lowered to {lowered_limit:g}"
            warnings.append(WarningEvent(key_paths.format_path(key_path), changed[key_path]))
            update["in_memory"] = dataset.in_memory.model_copy(update={"memory_limit_gb": lowered_limit})
        if dataset.instance_data_dir is None:
            warnings.append(WarningEvent(f"datasets[{index}]", "has no instance_data_dir: there is nothing to stage"))
        datasets.append(dataset.model_copy(update=update))
    run = config.run.model_copy(update={"output_dir": config.run.output_dir.absolute()})
    return config.model_copy(update={"datasets": tuple(datasets), "run": run}), warnings, changed


def _lowered_memory_limit(dataset: DatasetSettings, total: int | None) -> float | None:
    """The memory of this machine in GiB, rounded down, if the limit is above it; else None."""
    limit = dataset.in_memory.memory_limit_gb
    if limit is None or total is None or limit * GIB <= total:
        return None
    return math.floor(total / GIB * 100) / 100


def _dataset_ids(datasets: tuple[DatasetSettings, ...]) -> list[str]:
    """The id of each dataset: the given one, or the name of its folder, with a number if that is taken."""
    used_ids = {dataset.id for dataset in datasets if dataset.id}
    names = []
    for index, dataset in enumerate(datasets):
        folder = dataset.instance_data_dir.stem if dataset.instance_data_dir else ""
        name = base = dataset.id or re.sub(r"[^A-Za-z0-9._-]+", "-", folder).strip("-._") or f"dataset-{index}"
        number = 2
        while not dataset.id and name in used_ids:
            name, number = f"{base}-{number}", number + 1
        used_ids.add(name)
        names.append(name)
    return names


def settings_warnings(block: SettingsBlock, block_path: KeyPath = ()) -> Iterator[WarningEvent]:
    """The warnings of a block and of all blocks inside it, with the path of the setting."""
    for issue in block.warnings():
        yield WarningEvent(
            key_paths.format_path((*block_path, *(key_paths.parse_path(issue.field) or ()))), issue.message
        )
    for name in type(block).model_fields:
        inner = getattr(block, name)
        if isinstance(inner, SettingsBlock):
            yield from settings_warnings(inner, (*block_path, name))
        elif isinstance(inner, tuple):
            for index, entry in enumerate(inner):
                if isinstance(entry, SettingsBlock):
                    yield from settings_warnings(entry, (*block_path, name, index))
