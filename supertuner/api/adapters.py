"""Inspects and loads adapter files of any program, writes them for other programs, and merges them into models."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from supertuner.config.families import expert_names
from supertuner.core.errors import ModelError
from supertuner.core.types import JSON
from supertuner.models.adapters.keys_schemes import KEY_SCHEMES, KeyScheme
from supertuner.train.export.adapter_files import (
    AdapterFile,
    convert_adapter,
    load_adapter_tensors,
    open_adapter,
    refuse_checkpoint_part,
    with_expert,
)

if TYPE_CHECKING:
    from torch import Tensor

    from supertuner.train.export.adapter_inspect import AdapterInspection

PathLike: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True, eq=False, slots=True)
class LoadedAdapter:
    """An adapter in memory."""

    path: Path
    scheme: str
    """The key scheme of the file; the keys of `tensors` are in the scheme that was requested."""
    families: tuple[str, ...]
    """The model families whose layers it has."""
    experts: tuple[str | None, ...]
    """The experts that it is for; None: not known, or the model has one expert."""
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    def to_dict(self) -> dict[str, JSON]:
        """Everything but the values of the tensors, as JSON values."""
        tensors: dict[str, JSON] = {
            key: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            for key, tensor in self.tensors.items()
        }
        return {
            "path": str(self.path),
            "scheme": self.scheme,
            "families": list(self.families),
            "experts": list(self.experts),
            "tensors": tensors,
            "metadata": dict(self.metadata),
        }


@dataclass(frozen=True, slots=True)
class AdapterConversion:
    """A converted adapter file."""

    path: Path
    tensors: int
    from_scheme: str
    to_scheme: str
    summary: str
    """How many keys were matched and left out."""

    def to_dict(self) -> dict[str, JSON]:
        """Everything as JSON values."""
        return {
            "path": str(self.path),
            "tensors": self.tensors,
            "from_scheme": self.from_scheme,
            "to_scheme": self.to_scheme,
            "summary": self.summary,
        }


@dataclass(frozen=True, slots=True)
class MergedModel:
    """A model with adapters merged into its weights."""

    path: Path
    changed_layers: Mapping[str, int]
    """Component of the model → number of changed layers; 0: no adapter is for it."""

    def to_dict(self) -> dict[str, JSON]:
        """Everything as JSON values."""
        return {"path": str(self.path), "changed_layers": dict(self.changed_layers)}


def inspect(path: PathLike, *, family: str | None = None) -> AdapterInspection:
    """Describe an adapter file: key scheme, experts, kinds, ranks, scales, norms, unknown keys and metadata.

    Args:
        path: The .safetensors file.
        family: The model family, if the names of the layers fit several.

    Returns:
        The description. Its `not_finite` lists keys whose tensors contain NaN or infinite values.

    Raises:
        ModelError: The file is damaged, or none of its keys is known.
    """
    from supertuner.train.export.adapter_inspect import inspect_adapter

    return inspect_adapter(open_adapter(Path(path), family))


def schemes() -> dict[str, str]:
    """The key schemes that adapters can be written in: name → an example of a key."""
    from supertuner.train.export.adapter_export import example_key

    return {name: example_key(scheme) for name, scheme in KEY_SCHEMES.items()}


def load(
    path: PathLike,
    *,
    scheme: str = "diffusers",
    family: str | None = None,
    expert: str | None = None,
    partial: bool = False,
) -> LoadedAdapter:
    """Load an adapter file of any known program, with the keys of one scheme.

    Args:
        path: The .safetensors file.
        scheme: The key scheme of the result; see `schemes`.
        family: The model family, if the names of the layers fit several.
        expert: The expert, if neither the keys nor the file name show it.
        partial: Leave out unknown keys instead of raising ModelError.

    Raises:
        ModelError: The file is damaged, has unknown keys, or cannot be written in this scheme.
    """
    key_scheme = find_scheme(scheme)
    file = open_adapter_file(path, family=family, expert=expert, partial=partial)
    reading = file.reading
    return LoadedAdapter(
        file.path,
        reading.scheme.name,
        tuple(reading.families),
        tuple(reading.experts),
        load_adapter_tensors(file, key_scheme, family),
        file.metadata,
    )


def convert(
    path: PathLike,
    scheme: str,
    out: PathLike | None = None,
    *,
    family: str | None = None,
    expert: str | None = None,
    partial: bool = False,
    overwrite: bool = False,
) -> AdapterConversion:
    """Write an adapter with the key names of another program. At most one tensor is in memory.

    Args:
        path: The .safetensors file.
        scheme: The key scheme to write; see `schemes`.
        out: The new file. None: beside `path`, with the name of the scheme.
        family: The model family, if the names of the layers fit several.
        expert: The expert, if neither the keys nor the file name show it.
        partial: Leave out unknown keys instead of raising ModelError.
        overwrite: Replace an existing file.

    Raises:
        ModelError: The file is damaged, has unknown keys, or cannot be written in this scheme; or `out` exists.
    """
    key_scheme = find_scheme(scheme)
    file = open_adapter_file(path, family=family, expert=expert, partial=partial)
    target = Path(out) if out is not None else file.path.with_name(f"{file.path.stem}.{scheme}.safetensors")
    count = convert_adapter(file, key_scheme, target, overwrite=overwrite, family=family)
    return AdapterConversion(target, count, file.reading.scheme.name, scheme, file.reading.summary())


def export(
    path: PathLike,
    program: str,
    out: PathLike | None = None,
    *,
    family: str | None = None,
    expert: str | None = None,
    partial: bool = False,
    overwrite: bool = False,
) -> list[AdapterConversion]:
    """Write an adapter for a program: one file per expert, with the key names that the program reads.

    Either all files are written or none.

    Args:
        path: The .safetensors file.
        program: "diffusers" or "comfyui".
        out: The new file. None: beside `path`. The name of the expert is added if there are several.
        family: The model family, if the names of the layers fit several.
        expert: The expert, if neither the keys nor the file name show it.
        partial: Leave out unknown keys instead of raising ModelError.
        overwrite: Replace existing files.

    Raises:
        ModelError: The file is damaged or has unknown keys; the program cannot load this kind of adapter; or a file
            exists.
    """
    from supertuner.train.export.adapter_export import export_adapter

    file = open_adapter_file(path, family=family, expert=expert, partial=partial)
    target = None if out is None else Path(out)
    scheme, counts = export_adapter(file, program, target, overwrite=overwrite, family=family)
    reading = file.reading
    return [
        AdapterConversion(exported, count, reading.scheme.name, scheme.name, reading.summary())
        for exported, count in counts.items()
    ]


def merge(
    paths: PathLike | Sequence[PathLike],
    base: PathLike,
    out: PathLike,
    *,
    strength: float = 1.0,
    family: str | None = None,
    expert: str | None = None,
) -> MergedModel:
    """Write a copy of a model with adapters merged into its weights. The base is not changed.

    Args:
        paths: One adapter file, or one per expert.
        base: The folder of a diffusers pipeline.
        out: The new folder.
        strength: Factor of the adapters; 1 is as trained.
        family: The model family, if the names of the layers fit several.
        expert: The expert, if neither the keys nor the file name show it.

    Raises:
        ModelError: An adapter does not fit the base, `base` is not a pipeline, or `out` exists.
    """
    from supertuner.train.export.adapter_merge import merge_adapters

    all_paths = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files = [open_adapter_file(path, family=family, expert=expert) for path in all_paths]
    return MergedModel(Path(out), merge_adapters(files, Path(base), Path(out), strength))


def open_adapter_file(
    path: PathLike, *, family: str | None = None, expert: str | None = None, partial: bool = False
) -> AdapterFile:
    """Open an adapter file by its header, with its expert set. Raises ModelError if it is damaged, a part of a
    checkpoint, or has unknown keys and `partial` is false."""
    if expert is not None and expert not in expert_names():
        raise ModelError(f"{expert!r} is not an expert; known experts: {', '.join(expert_names())}")
    file_path = Path(path)
    refuse_checkpoint_part(file_path)
    file = open_adapter(file_path, family)
    if file.reading.unknown and not partial:
        raise ModelError(f"{file_path}: {file.reading.summary()}; set `partial` to leave them out")
    return with_expert(file, expert)


def find_scheme(name: str) -> KeyScheme:
    """The key scheme of this name. Raises ModelError, with the known names."""
    if name not in KEY_SCHEMES:
        raise ModelError(f"{name!r} is not a key scheme; known schemes: {', '.join(KEY_SCHEMES)}")
    return KEY_SCHEMES[name]
