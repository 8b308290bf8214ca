"""Where a model's files are on this machine, and what its config files say; weights are named here, not opened.

A name on the hub is pinned to a commit when its index is read: whatever is read later is of the same revision.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from supertuner.core.errors import ModelError
from supertuner.models import hub
from supertuner.models.spec import Model, Source
from supertuner.models.table import PIPELINES

Config: TypeAlias = Mapping[str, Any]

INDEX: Final = "model_index.json"
CONFIGS: Final = ("config.json", "scheduler_config.json", "tokenizer_config.json")
STEMS: Final = ("diffusion_pytorch_model", "model")
"""Names of weight files: of diffusers, and of transformers."""
SMALL: Final = (".json", ".txt", ".model", ".jinja")
"""Endings of configs and vocabularies."""


def read_index(source: Source, family: str) -> tuple[Source, Config]:
    """The pipeline's index, which must be of that family, and the source with its revision pinned."""
    if (folder := _local(source)) is None:
        folder = hub.snapshot(source, (INDEX, *(f"*/{name}" for name in CONFIGS)))
        source = replace(source, revision=folder.name)
    if not (folder / INDEX).is_file():
        raise ModelError(f"{source.path} has no {INDEX}: {_what_it_is(folder)}")
    index = _json(folder / INDEX)
    _require_family(source, str(index.get("_class_name")), family)
    for part, file in source.single_files.items():
        if file.suffix != ".safetensors" or not file.is_file():
            raise ModelError(f"{file}, the weights of {part}, is not a .safetensors file")
    return source, index


def read_parts(source: Source, index: Config, parts: Sequence[str]) -> Mapping[str, Config]:
    """Config of each of these parts by its name, and the index as `""`."""
    folder = _local(source) or hub.snapshot(source, tuple(f"{part}/{name}" for part in parts for name in CONFIGS))
    configs = {"": index}
    for part in parts:
        named = index.get(part)
        if not isinstance(named, list) or None in named:
            raise ModelError(f"{source.path}: its {INDEX} names no {part}, which this family needs")
        configs[part] = _json(_config_file(folder, part))
    return configs


def positive(source: Source, configs: Mapping[str, Config], part: str, keys: Sequence[str], default: float) -> float:
    """The first of these entries that a part's config has; a number above 0, or an error that names it."""
    key = next((key for key in keys if configs[part].get(key) is not None), None)
    value = default if key is None else configs[part][key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"{source.path}: the config of {part}: {key} is {value!r}, not a number above 0")
    return float(value)


def folder_of(source: Source, parts: Sequence[str]) -> Path:
    """The folder of the pipeline, with every file of these parts in it."""
    if (local := _local(source)) is not None:
        return local
    small = tuple(f"{part}/*{ending}" for part in parts for ending in SMALL)
    folder = hub.snapshot(source, small)
    weights = tuple(name for part in parts for name in _weight_names(folder, part, source.variant))
    return hub.snapshot(source, (*small, *weights))


def files_of(source: Source, parts: Sequence[str]) -> tuple[Path, ...]:
    """The files that decide what these parts compute: configs, vocabularies, and the weights that are loaded."""
    folder = folder_of(source, parts)
    files: list[Path] = []
    for part in parts:
        files += sorted(file for file in (folder / part).iterdir() if file.suffix in SMALL and file.is_file())
        if "tokenizer" not in part:
            files += weights_of(source, folder, part)
    return tuple(files)


def vae_files(model: Model) -> tuple[Path, ...]:
    """The files that decide what the VAE computes."""
    return files_of(model.source, ("vae",))


def largest_shift(source: Source, configs: Mapping[str, Config], max_shift: float) -> float:
    """The scheduler's shift. With dynamic shifting it grows with the picture; this is that of the largest, 1024×1024,
    the exponential of `max_shift` where the config names no other."""
    if configs["scheduler"].get("use_dynamic_shifting"):
        return math.exp(positive(source, configs, "scheduler", ("max_shift",), max_shift))
    return positive(source, configs, "scheduler", ("shift",), 1.0)


def weights_of(source: Source, folder: Path, part: str) -> tuple[Path, ...]:
    """The .safetensors files with a part's weights; all of them are there."""
    if part in source.single_files:
        return (source.single_files[part],)
    files = [folder / name for name in _weight_names(folder, part, source.variant)]
    if any(file.parent.name == part and file.name.count("-of-") for file in files):
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(f"{folder / part}: {', '.join(missing)} of its weights is missing; fetch the model again")
        return tuple(files)
    found = [file for file in files if file.is_file()]
    if not found:
        raise ModelError(_no_weights(folder / part, source.variant))
    return (found[0],)


def _weight_names(folder: Path, part: str, variant: str | None) -> Iterator[str]:
    """Relative to the folder: the shards that an index file names, else the names that a single file may have."""
    for stem in STEMS:
        index = (
            folder
            / part
            / (f"{stem}.safetensors.index.{variant}.json" if variant else f"{stem}.safetensors.index.json")
        )
        if index.is_file():
            shards = sorted(set(_json(index).get("weight_map", {}).values()))
            if any(Path(shard).name != shard for shard in shards):
                raise ModelError(f"{index}: names a file outside its folder")
            yield from (f"{part}/{shard}" for shard in shards)
            return
    yield from (f"{part}/{stem}.{variant}.safetensors" if variant else f"{part}/{stem}.safetensors" for stem in STEMS)


def _no_weights(folder: Path, variant: str | None) -> str:
    here = sorted(file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".pt", ".ckpt"))
    if variant and here:
        return f"model.variant is {variant!r}: {folder} has no such weights, but {', '.join(here)}"
    if any(not name.endswith(".safetensors") for name in here):
        return (
            f"{folder} has {', '.join(here)}: such files can run code when they are opened; only .safetensors is read"
        )
    return f"{folder} has no .safetensors file; fetch the model again"


def _local(source: Source) -> Path | None:
    """The folder that is meant, or None if it can only be a name on the hub."""
    path = Path(source.path).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelError(
            f"model.path is the file {source.path}; it names the folder of a whole diffusers pipeline, "
            "and weights of the denoiser alone go into model.single_file"
        )
    if path.is_absolute() or source.path.startswith((".", "~")) or source.path.count("/") > 1:
        raise ModelError(f"model.path is {source.path!r}: there is no such folder")
    return None


def _require_family(source: Source, kind: str, family: str) -> None:
    fits = PIPELINES.get(kind)
    if fits == family:
        return
    mine = ", ".join(name for name, of in PIPELINES.items() if of == family)
    remedy = f'set model.family to "{fits}"' if fits else f"{family} takes {mine}"
    raise ModelError(f"{source.path} is a {kind}, and model.family is {family!r}; {remedy}")


def _what_it_is(folder: Path) -> str:
    if (folder / "config.json").is_file():
        return "it is one part of a pipeline; give the folder above it"
    if any((folder / name).is_dir() for name in ("high_noise_model", "low_noise_model")):
        return "it has the layout of the model's own authors; use the repository whose name ends in -Diffusers"
    return "it is not the folder of a diffusers pipeline"


def _config_file(folder: Path, part: str) -> Path:
    for name in CONFIGS:
        if (folder / part / name).is_file():
            return folder / part / name
    problem = "has no config file" if (folder / part).is_dir() else "is missing"
    raise ModelError(f"{folder / part} {problem}, and the pipeline's {INDEX} names it; fetch the model again")


def _json(file: Path) -> Config:
    try:
        read = json.loads(file.read_bytes())
    except (ValueError, OSError) as error:
        raise ModelError(f"{file} cannot be read as JSON ({error}); fetch the model again") from error
    if not isinstance(read, dict):
        raise ModelError(f"{file} does not hold a JSON object; fetch the model again")
    return read
