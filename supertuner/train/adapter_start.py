"""The files of adapters that a run begins with or is trained on top of, read for one expert.

Keys that are not understood and files of the other expert are refused: an adapter on the wrong expert would load
without a murmur.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from supertuner.config.model import AdapterSettings
from supertuner.core.errors import ModelError
from supertuner.models.adapters import for_expert
from supertuner.models.keys import split_tensor
from supertuner.models.keys_schemes import Scheme, spelled
from supertuner.models.spec import Tensors
from supertuner.train.adapter_files import AdapterFile, load_as, of_expert, open_adapter

PLAIN: Final = Scheme("bare", "diffusers", "kohya")
"""diffusers' layers, the tensors as LyCORIS calls them, alpha said."""


def given(settings: AdapterSettings, family: str, expert: str, *, alone: bool) -> dict[str, dict[str, Tensors]]:
    """The files that the settings name for this expert: setting → layer → tensors."""
    own = for_expert(settings, expert)
    named = {"frozen": own.frozen, "start_from": None if own.type == "full" else own.start_from}
    return {name: tensors_of(path, family, expert, alone=alone) for name, path in named.items() if path is not None}


def tensors_of(path: Path, family: str, expert: str, *, alone: bool) -> dict[str, Tensors]:
    """Layer → its tensors in fp32. `alone`: the model has no other expert."""
    file = open_adapter(path, family)
    if file.reading.unknown:
        raise ModelError(f"{path}: {file.reading.report()}")
    found: dict[str, Tensors] = {}
    for key, tensor in load_as(_part(file, expert, alone), PLAIN, family).items():
        split = split_tensor(key)
        assert split is not None, key
        found.setdefault(split[0], {})[spelled(split[1], PLAIN.spelling)] = tensor.float()
    return found


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
