"""Compares the headers of a component's weight files with the module that its config describes; no weights are loaded.

The names in a file are mapped to those of the module by the library that would load it: on meta tensors of the shapes
in the headers. Names that the library knows to ignore are ignored here, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from supertuner.core.errors import ModelError
from supertuner.core.interrupts import interrupts_win
from supertuner.models.library_guards import quiet_libraries
from supertuner.models.loading import build_meta_module, component_class, read_weight_header
from supertuner.models.pipeline_files import pipeline_folder, shard_index, weight_files, weight_names
from supertuner.models.spec import ModelDescription

TensorShapes: TypeAlias = dict[str, tuple[int, ...]]
NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class WeightFileReport:
    """What the headers of a component's weight files say."""

    component: str
    files: int
    tensors: int
    nbytes: int
    problems: tuple[str, ...]
    """Loading would fail, or give a module without some of its values."""
    remarks: tuple[str, ...]
    """Loading would ignore this."""


def components_with_weights(model: ModelDescription) -> tuple[str, ...]:
    """The components of the pipeline that have weights: denoisers, VAE, text encoders."""
    denoisers = tuple(expert.component for expert in model.experts)
    return (*denoisers, *(name for name in model.configs if name.startswith(("vae", "text_encoder"))))


@interrupts_win()
def check_weight_files(model: ModelDescription, component: str) -> WeightFileReport:
    """Read the headers of all weight files of a component, and compare them with its module on the meta device.

    Raises ModelError if the component is on the hub and not in its cache (with `source.offline`), or if its config is
    unusable.
    """
    folder = pipeline_folder(model.source, (component,))
    problems: list[str] = []
    try:
        files = weight_files(model.source, folder, component)
    except ModelError as error:
        problems.append(str(error))
        names = weight_names(folder, component, model.source.variant)
        files = tuple(folder / name for name in names if (folder / name).is_file())
    shapes_by_file: dict[str, TensorShapes] = {}
    for file in files:
        try:
            shapes_by_file[file.name] = read_weight_header(file)
        except ModelError as error:
            problems.append(str(error))
    index = None if component in model.source.single_files else shard_index(folder, component, model.source.variant)
    if index is not None:
        problems += _index_problems(index, shapes_by_file)
    shapes = {name: shape for content in shapes_by_file.values() for name, shape in content.items()}
    remarks: list[str] = []
    if not problems:  # with a file missing, half of the names would be reported as missing
        where = files[0] if component in model.source.single_files else folder / component
        missing, wrong, unknown = _compare(model, component, shapes)
        problems += _listed(f"{where} lacks", missing, "that its config needs; download it again")
        problems += _listed(
            f"{where} has other shapes than its config describes:", wrong, "; it belongs to another model"
        )
        remarks += _listed(f"{where} has", unknown, "that its class does not have; they are not loaded")
    nbytes = sum(file.stat().st_size for file in files)
    return WeightFileReport(component, len(files), len(shapes), nbytes, tuple(problems), tuple(remarks))


def _index_problems(index: Path, shapes_by_file: Mapping[str, TensorShapes]) -> list[str]:
    """Disagreements between an index of shards and the shards that could be read."""
    by_shard: dict[str, set[str]] = {}
    for tensor, shard in json.loads(index.read_bytes())["weight_map"].items():
        by_shard.setdefault(shard, set()).add(tensor)
    problems = []
    for shard, shapes in shapes_by_file.items():
        absent, unlisted = by_shard[shard] - shapes.keys(), shapes.keys() - by_shard[shard]
        problems += _listed(f"{index.parent / shard} lacks", absent, f"that {index.name} names; download both again")
        problems += _listed(
            f"{index.parent / shard} has", unlisted, f"that {index.name} does not name; download both again"
        )
    return problems


def _compare(model: ModelDescription, component: str, shapes: TensorShapes) -> tuple[list[str], list[str], list[str]]:
    """(names that are missing, names with their wrong shapes, names that are not of the module)."""
    library_class = component_class(model, component)
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    try:
        with quiet_libraries():
            if library_class.__module__.startswith("transformers."):
                return _compare_with_transformers(library_class, dict(model.configs[component]), tensors)
            return _compare_with_diffusers(model, component, tensors)
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"the weights of {component} cannot be loaded as {library_class.__name__}: {reason}"
        ) from error


def _compare_with_transformers(
    library_class: Any, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> tuple[list[str], list[str], list[str]]:
    _, report = library_class.from_pretrained(
        None,
        config=library_class.config_class.from_dict(config),
        state_dict=tensors,
        device_map={"": "meta"},
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    wrong = [f"{name} {tuple(actual)}, not {tuple(wanted)}" for name, actual, wanted in report["mismatched_keys"]]
    return list(report["missing_keys"]), wrong, list(report["unexpected_keys"])


def _compare_with_diffusers(
    model: ModelDescription, component: str, tensors: dict[str, torch.Tensor]
) -> tuple[list[str], list[str], list[str]]:
    module: Any = build_meta_module(model, component)
    expected = module.state_dict()
    if component in model.source.single_files:
        tensors = _with_diffusers_names(type(module).__name__, expected, dict(module.config), tensors)
    else:
        module._fix_state_dict_keys_on_load(tensors)
    ignored = module._keys_to_ignore_on_load_unexpected or ()
    unknown = [name for name in tensors if name not in expected and not any(re.search(one, name) for one in ignored)]
    wrong = [
        f"{name} {tuple(tensors[name].shape)}, not {tuple(wanted.shape)}"
        for name, wanted in expected.items()
        if name in tensors and tensors[name].shape != wanted.shape
    ]
    return [name for name in expected if name not in tensors], wrong, unknown


def _with_diffusers_names(
    class_name: str, expected: Mapping[str, torch.Tensor], config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of a single file, with the names of diffusers if it has those of the model's original code."""
    from diffusers.loaders import single_file_model as conversion

    if class_name not in conversion.SINGLE_FILE_LOADABLE_CLASSES:
        raise ValueError("diffusers cannot load this class from a single file; use a folder")
    if not conversion._should_convert_state_dict_to_diffusers(expected, tensors):
        return tensors
    convert = conversion.SINGLE_FILE_LOADABLE_CLASSES[class_name]["checkpoint_mapping_fn"]
    converted: dict[str, torch.Tensor] = convert(config=config, checkpoint=tensors)
    return converted


def _listed(before: str, names: Iterable[str], after: str) -> list[str]:
    """One sentence about these names; none if there are none."""
    ordered = sorted(names)
    if not ordered:
        return []
    examples = ", ".join(ordered[:NAMES_SHOWN]) + (" …" if len(ordered) > NAMES_SHOWN else "")
    separator = "" if after.startswith(";") else " "
    return [f"{before} {len(ordered)} tensors ({examples}){separator}{after}"]
