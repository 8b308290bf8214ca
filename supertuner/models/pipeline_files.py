"""Finds a model's files, locally or on the hub, and reads its configs. Weight files are located, not opened.

A repository on the hub is pinned to a commit when its index is read: everything read later is of the same revision.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from supertuner.config.families import expert_names, family_by_pipeline
from supertuner.core.errors import ModelError
from supertuner.models import hub
from supertuner.models.spec import ModelDescription, ModelSource

ConfigDict: TypeAlias = Mapping[str, Any]

INDEX_NAME: Final = "model_index.json"
CONFIG_NAMES: Final = ("config.json", "scheduler_config.json", "tokenizer_config.json")
WEIGHT_STEMS: Final = ("diffusion_pytorch_model", "model")
"""Stems of weight files of diffusers and of transformers."""
CONFIG_SUFFIXES: Final = (".json", ".txt", ".model", ".jinja")
"""Suffixes of configs and vocabularies."""


def read_pipeline(
    source: ModelSource, family: str, components: Sequence[str]
) -> tuple[ModelSource, Mapping[str, ConfigDict]]:
    """The source with its revision pinned, and the configs of the pipeline (`""`) and of these components.

    Raises ModelError if the pipeline is not of that family or lacks a component.
    """
    source, index = read_index(source, family)
    return source, read_component_configs(source, index, components)


def read_index(source: ModelSource, family: str) -> tuple[ModelSource, ConfigDict]:
    """The source with its revision pinned, and the pipeline's index. Raises ModelError if it is of another family."""
    if (folder := _local_folder(source)) is None:
        folder = hub.download_snapshot(source, (INDEX_NAME, *(f"*/{name}" for name in CONFIG_NAMES)))
        source = replace(source, revision=folder.name)
    if not (folder / INDEX_NAME).is_file():
        raise ModelError(f"{source.path} has no {INDEX_NAME}: {_layout_problem(folder)}")
    index = _read_json(folder / INDEX_NAME)
    _require_family(source, str(index.get("_class_name")), family)
    for component, file in source.single_files.items():
        if file.suffix != ".safetensors" or not file.is_file():
            raise ModelError(f"{file}, for the weights of {component}, is not an existing .safetensors file")
    return source, index


def read_component_configs(
    source: ModelSource, index: ConfigDict, components: Sequence[str]
) -> Mapping[str, ConfigDict]:
    """The config of each component by name, and the index with the key `""`. Raises ModelError if one is missing."""
    folder = _local_folder(source) or hub.download_snapshot(
        source, tuple(f"{component}/{name}" for component in components for name in CONFIG_NAMES)
    )
    configs = {"": index}
    for part in components:
        class_entry = index.get(part)
        if not isinstance(class_entry, list) or None in class_entry:
            raise ModelError(f"{source.path}: its {INDEX_NAME} names no {part}, which this family needs")
        configs[part] = _read_json(_config_file(folder, part))
    return configs


def positive_number(
    source: ModelSource, configs: Mapping[str, ConfigDict], component: str, keys: Sequence[str], default: float
) -> float:
    """The first of `keys` in a component's config, or `default`. Raises ModelError if it is not a number above 0."""
    key = next((key for key in keys if configs[component].get(key) is not None), None)
    value = default if key is None else configs[component][key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"{source.path}: the config of {component}: {key} is {value!r}, not a number above 0")
    return float(value)


def pipeline_folder(source: ModelSource, components: Sequence[str]) -> Path:
    """The folder of the pipeline, after downloading all files of these components if it is on the hub."""
    if (local := _local_folder(source)) is not None:
        return local
    return hub.download_snapshot(source, (*_config_patterns(components), *_weight_patterns(source, components)))


def pending_download_bytes(source: ModelSource, components: Sequence[str]) -> int:
    """Bytes of the weight files of these components that are on the hub and not yet in its cache; 0 for a folder."""
    if _local_folder(source) is not None:
        return 0
    return hub.pending_bytes(source, _weight_patterns(source, components))


def _config_patterns(components: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{part}/*{ending}" for part in components for ending in CONFIG_SUFFIXES)


def _weight_patterns(source: ModelSource, components: Sequence[str]) -> tuple[str, ...]:
    """The names of the weight files on the hub, after downloading the configs, which list the shards."""
    folder = hub.download_snapshot(source, _config_patterns(components))
    return tuple(name for part in components for name in weight_names(folder, part, source.variant))


def component_files(source: ModelSource, components: Sequence[str]) -> tuple[Path, ...]:
    """The files that determine what these components compute: configs, vocabularies and the loaded weights."""
    folder = pipeline_folder(source, components)
    files: list[Path] = []
    for component in components:
        files += config_files(folder / component)
        if "tokenizer" not in component:
            files += weight_files(source, folder, component)
    return tuple(files)


def config_files(folder: Path) -> list[Path]:
    """The configs and vocabularies in a component's folder, sorted."""
    return sorted(file for file in folder.iterdir() if file.suffix in CONFIG_SUFFIXES and file.is_file())


def vae_files(model: ModelDescription) -> tuple[Path, ...]:
    """The files that determine what the VAE computes."""
    return component_files(model.source, ("vae",))


def text_files(model: ModelDescription) -> tuple[Path, ...]:
    """The files that determine what the text encoders compute: those of every text encoder and tokenizer."""
    return component_files(
        model.source, tuple(name for name in model.configs if name.startswith(("text_encoder", "tokenizer")))
    )


def largest_shift(source: ModelSource, configs: Mapping[str, ConfigDict], max_shift: float) -> float:
    """The scheduler's shift. With dynamic shifting it grows with the image, and this is the shift of the largest one,
    1024×1024: exp(max_shift), where `max_shift` is the default of that entry."""
    if configs["scheduler"].get("use_dynamic_shifting"):
        return math.exp(positive_number(source, configs, "scheduler", ("max_shift",), max_shift))
    return positive_number(source, configs, "scheduler", ("shift",), 1.0)


def weight_files(source: ModelSource, folder: Path, component: str) -> tuple[Path, ...]:
    """The .safetensors files with a component's weights. Raises ModelError if one is missing."""
    if component in source.single_files:
        return (source.single_files[component],)
    files = [folder / name for name in weight_names(folder, component, source.variant)]
    if any(file.parent.name == component and file.name.count("-of-") for file in files):
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(
                f"{folder / component}: weight files are missing: {', '.join(missing)}; download the model again"
            )
        return tuple(files)
    present = [file for file in files if file.is_file()]
    if not present:
        raise ModelError(_no_weights_message(folder / component, source.variant))
    return (present[0],)


def weight_names(folder: Path, component: str, variant: str | None) -> Iterator[str]:
    """Paths relative to the folder: the shards in an index file, or else the possible names of a single file."""
    if (index := shard_index(folder, component, variant)) is not None:
        shards = sorted(set(_read_json(index).get("weight_map", {}).values()))
        if any(Path(shard).name != shard for shard in shards):
            raise ModelError(f"{index} names a file outside its folder")
        yield from (f"{component}/{shard}" for shard in shards)
        return
    yield from (
        f"{component}/{stem}.{variant}.safetensors" if variant else f"{component}/{stem}.safetensors"
        for stem in WEIGHT_STEMS
    )


def shard_index(folder: Path, component: str, variant: str | None) -> Path | None:
    """The file that lists a component's shards; None: its weights are one file."""
    ending = f"index.{variant}.json" if variant else "index.json"
    candidates = (folder / component / f"{stem}.safetensors.{ending}" for stem in WEIGHT_STEMS)
    return next((index for index in candidates if index.is_file()), None)


def _no_weights_message(folder: Path, variant: str | None) -> str:
    weight_names = sorted(
        file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".pt", ".ckpt")
    )
    if variant and weight_names:
        return f"model.variant is {variant!r}, but {folder} has {', '.join(weight_names)}"
    if any(not name.endswith(".safetensors") for name in weight_names):
        return f"{folder} has {', '.join(weight_names)}; loading such files can run code, so only .safetensors is read"
    return f"{folder} has no .safetensors file; download the model again"


def _local_folder(source: ModelSource) -> Path | None:
    """The local folder, or None if the path can only be a repository on the hub. Raises ModelError if it is neither."""
    path = Path(source.path).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelError(
            f"model.path is the file {source.path}; set it to the folder of a whole diffusers pipeline, "
            "and model.single_file to a file with the denoiser's weights"
        )
    if path.is_absolute() or source.path.startswith((".", "~")) or source.path.count("/") > 1:
        raise ModelError(f"model.path is {source.path!r}: there is no such folder")
    return None


def _require_family(source: ModelSource, pipeline_class: str, family: str) -> None:
    matching_family = family_by_pipeline().get(pipeline_class)
    if matching_family == family:
        return
    accepted = ", ".join(name for name, other in family_by_pipeline().items() if other == family)
    remedy = f'set model.family to "{matching_family}"' if matching_family else f"{family} takes {accepted}"
    raise ModelError(f"{source.path} is a {pipeline_class}, but model.family is {family!r}; {remedy}")


def _layout_problem(folder: Path) -> str:
    if (folder / "config.json").is_file():
        return "it is one component of a pipeline; use the folder above it"
    if any((folder / name).is_dir() for name in map("{}_model".format, expert_names())):
        return "it has the layout of the original release; use the repository whose name ends in -Diffusers"
    return "it is not the folder of a diffusers pipeline"


def _config_file(folder: Path, component: str) -> Path:
    for name in CONFIG_NAMES:
        if (folder / component / name).is_file():
            return folder / component / name
    problem = "has no config file" if (folder / component).is_dir() else "is missing"
    raise ModelError(
        f"{folder / component} {problem}, but the pipeline's {INDEX_NAME} names it; download the model again"
    )


def _read_json(file: Path) -> ConfigDict:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, OSError) as error:
        raise ModelError(f"{file} cannot be read as JSON ({error}); download the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} does not hold a JSON object; download the model again")
    return content
