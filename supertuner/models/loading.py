"""Parts of a pipeline from a folder: modules that are frozen, aligned, and made without anybody's random numbers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from supertuner.core.errors import ModelError
from supertuner.models.reading import folder_of
from supertuner.models.spec import Model

_LIBRARIES = ("diffusers", "transformers")


def class_of(model: Model, part: str) -> Any:
    """The class that the pipeline's index names for a part."""
    named = model.configs[""].get(part)
    if not isinstance(named, list | tuple) or len(named) != 2 or None in named:
        raise ModelError(f"{model.source.path} has no part {part!r}")
    library, name = (str(one) for one in named)
    if library not in _LIBRARIES:
        raise ModelError(f"{model.source.path}: the part {part!r} comes from {library!r}, which is not loaded")
    found = getattr(import_module(library), name, None)
    if found is None:
        raise ModelError(f"{model.source.path}: the part {part!r} is a {name}, which this {library} does not have")
    return found


def module(model: Model, part: str, dtype: torch.dtype) -> nn.Module:
    """A part with weights: on the CPU, in eval mode, no gradient required."""
    kind = class_of(model, part)
    folder = folder_of(model.source, (part,))
    with torch.random.fork_rng(devices=[]):
        loaded = kind.from_pretrained(
            folder, subfolder=part, dtype=dtype, variant=model.source.variant, use_safetensors=True
        )
    loaded.eval().requires_grad_(False)
    align(loaded)
    assert isinstance(loaded, nn.Module)
    return loaded


def plain(model: Model, part: str) -> Any:
    """A part without weights: a tokenizer or a scheduler."""
    return class_of(model, part).from_pretrained(folder_of(model.source, (part,)), subfolder=part)


def align(loaded: nn.Module) -> None:
    """Give each tensor memory of its own, one after the other.

    Memory mapped from a .safetensors file begins anywhere, and CPU kernels round differently on unaligned data: the
    same weights loaded twice would give results that differ in the last bits.
    """
    seen: dict[int, torch.Tensor] = {}
    for tensor in (*loaded.parameters(), *loaded.buffers()):
        if id(tensor) not in seen:
            seen[id(tensor)] = tensor
            tensor.data = tensor.data.clone()
