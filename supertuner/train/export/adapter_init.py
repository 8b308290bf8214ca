"""Reads the adapter files that a run starts from (`adapter.start_from`) or trains on top of (`adapter.frozen`).

Unknown keys, files of another family or another expert, and values that are not finite are refused: an adapter on the
wrong expert would otherwise load silently.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import xxhash

from supertuner.config.families import layers_of
from supertuner.config.settings.model import AdapterSettings
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import ModelError
from supertuner.models.adapters.attach import resolve_targets, settings_for_expert
from supertuner.models.adapters.existing_adapters import ExistingAdapter, check_initial_values, check_merge_frozen
from supertuner.models.adapters.keys import split_tensor_name
from supertuner.models.adapters.keys_schemes import ALPHA, KeyScheme, spell_tensor
from supertuner.models.loading import build_meta_module
from supertuner.models.spec import Expert, Family, ModelDescription, Tensors
from supertuner.train.export.adapter_files import (
    AdapterFile,
    load_adapter_tensors,
    open_adapter,
    refuse_checkpoint_part,
    select_expert,
)

INITIAL_WEIGHTS_SCHEME: Final = KeyScheme("bare", "diffusers", "kohya")
"""Layers named as in diffusers, tensors as in LyCORIS, with explicit alphas."""
NUMBERS_OF_ANY_TYPE: Final = (ALPHA, "on_input")
"""Tensors that are settings, not weights; some programs write them as integers."""


def check_initial_adapters(
    config: RunConfig, family: Family, model: ModelDescription, expert: Expert
) -> dict[str, str]:
    """Check an expert's adapter files against its layers on meta tensors; ModelError if one does not fit.

    Called before hours of encoding. Returns setting → digest of the file's tensors.
    """
    settings = settings_for_expert(config.adapter, expert.name)
    files = load_initial_adapters(config.adapter, family.name, expert.name, only_expert=len(model.experts) == 1)
    for setting, file in files.items():
        module = build_meta_module(model, expert.component)
        try:
            if setting == "frozen":
                check_merge_frozen(module, file)
            else:
                check_initial_values(
                    module, settings, resolve_targets(settings, family.target_presets), expert.name, file
                )
        except ModelError as error:
            raise ModelError(f"{setting_path(config.adapter, expert.name, setting)}: {error}") from error
    return {setting_path(config.adapter, expert.name, setting): file.digest for setting, file in files.items()}


def load_initial_adapters(
    settings: AdapterSettings, family: str, expert: str, *, only_expert: bool
) -> dict[str, ExistingAdapter]:
    """Setting → the adapter file that it names for this expert. ModelError names the setting."""
    expert_settings = settings_for_expert(settings, expert)
    path_by_setting = {
        "frozen": expert_settings.frozen,
        "start_from": None if expert_settings.type == "full" else expert_settings.start_from,
    }
    initial_adapters = {}
    for setting, path in path_by_setting.items():
        if path is not None:
            try:
                layers = load_layer_tensors(path, family, expert, only_expert=only_expert)
            except ModelError as error:
                raise ModelError(f"{setting_path(settings, expert, setting)}: {error}") from error
            initial_adapters[setting] = ExistingAdapter(path, layers, _layers_digest(layers))
    return initial_adapters


def setting_path(settings: AdapterSettings, expert: str, setting: str) -> str:
    """The path of the setting that names an expert's file, as in the configuration."""
    own = getattr(settings.for_expert(expert), setting) is not None
    return f"adapter.{expert}.{setting}" if own else f"adapter.{setting}"


def load_layer_tensors(path: Path, family: str, expert: str, *, only_expert: bool) -> dict[str, Tensors]:
    """Layer → its tensors in fp32. `only_expert`: the model has no other expert."""
    file = _select_part(_open_understood_adapter(path, family), expert, only_expert)
    tensors_by_layer: dict[str, Tensors] = {}
    for key, tensor in load_adapter_tensors(file, INITIAL_WEIGHTS_SCHEME, family).items():
        split = split_tensor_name(key)
        assert split is not None, key
        if not tensor.is_floating_point() and split[1] not in NUMBERS_OF_ANY_TYPE:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"{path}: {key} has numbers of type {dtype}; an adapter has floating-point weights")
        exact = tensor.float()
        if not exact.isfinite().all():
            raise ModelError(f"{path}: {key} has values that are not finite; the file cannot be used")
        tensors_by_layer.setdefault(split[0], {})[spell_tensor(split[1], INITIAL_WEIGHTS_SCHEME.spelling)] = exact
    return tensors_by_layer


def _open_understood_adapter(path: Path, family: str) -> AdapterFile:
    refuse_checkpoint_part(path)
    try:
        file = open_adapter(path, family)
    except ModelError:
        _refuse_other_family(path, family)
        raise
    if file.reading.unknown:
        _refuse_other_family(path, family)
        remedy = "`supertuner adapter convert FILE --to bare --partial` writes a file without them"
        raise ModelError(f"{path}: {file.reading.summary()}; {remedy}")
    return file


def _refuse_other_family(path: Path, family: str) -> None:
    """ModelError if all keys of the file are those of other families."""
    reading = open_adapter(path).reading
    if not reading.unknown and layers_of(family) not in reading.families:
        raise ModelError(
            f"{path} is an adapter for {' or '.join(reading.families)}, and model.family is {family!r}; use a file for "
            "this family"
        )


def _layers_digest(layers: dict[str, Tensors]) -> str:
    digest = xxhash.xxh3_128()
    for layer, tensors in sorted(layers.items()):
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{layer} {name} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def _select_part(file: AdapterFile, expert: str, only_expert: bool) -> AdapterFile:
    """The part of the file that is for this expert. ModelError if the file is for another one."""
    key_experts = [name for name in file.reading.experts if name is not None]
    if only_expert:
        if len(key_experts) > 1:
            raise ModelError(f"{file.path} has {' and '.join(key_experts)}, and the model has one expert")
        return file
    if key_experts and expert not in key_experts:
        raise ModelError(
            f"{file.path}: its keys are for {' and '.join(key_experts)}, not for {expert}; {_remedy(expert)}"
        )
    if not key_experts and file.expert not in (None, expert):
        raise ModelError(
            f"{file.path} is for {file.expert} by its metadata or its name, not for {expert}; {_remedy(expert)}"
        )
    return select_expert(file, expert) if key_experts else file


def _remedy(expert: str) -> str:
    return f"name a file for this expert in adapter.{expert}"
