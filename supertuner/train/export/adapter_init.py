"""The files of adapters that a run begins with or is trained on top of, read for one expert.

Keys that are not understood, files of another family or of the other expert and values that are no numbers are refused:
an adapter on the wrong expert would load without a murmur.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import xxhash

from supertuner.config.settings.model import AdapterSettings
from supertuner.config.settings.tree import RunConfig
from supertuner.core.errors import ModelError
from supertuner.models.adapters.attach import for_expert, targets_of
from supertuner.models.adapters.initial_weights import Given, try_freeze, try_start
from supertuner.models.adapters.keys import split_tensor
from supertuner.models.adapters.keys_modules import family_of_layers
from supertuner.models.adapters.keys_schemes import Scheme, spelled
from supertuner.models.loading import skeleton
from supertuner.models.spec import Expert, Family, Model, Tensors
from supertuner.train.export.adapter_files import AdapterFile, load_as, of_expert, open_adapter, require_scaled

PLAIN: Final = Scheme("bare", "diffusers", "kohya")
"""diffusers' layers, the tensors as LyCORIS calls them, alpha said."""


def tried(config: RunConfig, family: Family, model: Model, expert: Expert) -> dict[str, str]:
    """Try an expert's files on its layers, without their weights: what does not fit is refused now, not after hours of
    encoding. Setting → what the file's tensors are known by."""
    settings = for_expert(config.adapter, expert.name)
    files = given(config.adapter, family.name, expert.name, alone=len(model.experts) == 1)
    for setting, file in files.items():
        module = skeleton(model, expert.part)
        try:
            if setting == "frozen":
                try_freeze(module, file)
            else:
                try_start(module, settings, targets_of(settings, family.targets), expert.name, file)
        except ModelError as error:
            raise ModelError(f"{place(config.adapter, expert.name, setting)}: {error}") from error
    return {place(config.adapter, expert.name, setting): file.digest for setting, file in files.items()}


def given(settings: AdapterSettings, family: str, expert: str, *, alone: bool) -> dict[str, Given]:
    """The files that the settings name for this expert, by setting."""
    own = for_expert(settings, expert)
    named = {"frozen": own.frozen, "start_from": None if own.type == "full" else own.start_from}
    found = {}
    for setting, path in named.items():
        if path is not None:
            try:
                layers = tensors_of(path, family, expert, alone=alone)
            except ModelError as error:
                raise ModelError(f"{place(settings, expert, setting)}: {error}") from error
            found[setting] = Given(path, layers, _digest(layers))
    return found


def place(settings: AdapterSettings, expert: str, setting: str) -> str:
    """The setting that names an expert's file, as it is written."""
    own = {"high_noise": settings.high_noise, "low_noise": settings.low_noise}.get(expert)
    return f"adapter.{setting}" if own is None or getattr(own, setting) is None else f"adapter.{expert}.{setting}"


def tensors_of(path: Path, family: str, expert: str, *, alone: bool) -> dict[str, Tensors]:
    """Layer → its tensors in fp32. `alone`: the model has no other expert."""
    file = _part(_opened(path, family), expert, alone)
    found: dict[str, Tensors] = {}
    for key, tensor in load_as(file, PLAIN, family).items():
        split = split_tensor(key)
        assert split is not None, key
        exact = tensor.float()
        if not exact.isfinite().all():
            raise ModelError(f"{path}: {key} has values that are no numbers; the file cannot be used")
        found.setdefault(split[0], {})[spelled(split[1], PLAIN.spelling)] = exact
    return found


def _opened(path: Path, family: str) -> AdapterFile:
    require_scaled(path)
    try:
        file = open_adapter(path, family)
    except ModelError:
        _refuse_other_family(path, family)
        raise
    if file.reading.unknown:
        _refuse_other_family(path, family)
        remedy = "`supertuner adapter convert FILE --to bare --partial` writes a file without them"
        raise ModelError(f"{path}: {file.reading.report()}; {remedy}")
    return file


def _refuse_other_family(path: Path, family: str) -> None:
    """Say so where all keys are those of other models."""
    found = open_adapter(path).reading
    if not found.unknown and family_of_layers(family) not in found.families:
        raise ModelError(
            f"{path} is an adapter of {' or '.join(found.families)}, and model.family is {family!r}; name a file of "
            "this family"
        )


def _digest(layers: dict[str, Tensors]) -> str:
    digest = xxhash.xxh3_128()
    for layer, tensors in sorted(layers.items()):
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{layer} {name} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def _part(file: AdapterFile, expert: str, alone: bool) -> AdapterFile:
    """What of the file is for this expert."""
    marked = [one for one in file.reading.experts if one is not None]
    if alone:
        if len(marked) > 1:
            raise ModelError(f"{file.path} has {' and '.join(marked)}, and the model has one expert")
        return file
    if marked and expert not in marked:
        raise ModelError(f"{file.path}: its keys are of {' and '.join(marked)}, not of {expert}; {_remedy(expert)}")
    if not marked and file.expert not in (None, expert):
        raise ModelError(
            f"{file.path} is of {file.expert} by its metadata or its name, not of {expert}; {_remedy(expert)}"
        )
    return of_expert(file, expert) if marked else file


def _remedy(expert: str) -> str:
    return f"give this expert a file of its own in adapter.{expert}"
