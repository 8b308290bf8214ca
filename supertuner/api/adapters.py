"""Inspects and loads adapter files of any program, writes them for other programs, and merges them into models."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial as partial_call
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from supertuner.config.families import expert_names, later_experts
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
    source: PathLike,
    program: str,
    out: PathLike | None = None,
    *,
    base: PathLike | None = None,
    family: str | None = None,
    partial: bool = False,
    overwrite: bool = False,
) -> list[AdapterConversion]:
    """Write an adapter for a program: one file per expert, with the key names that the program reads.

    Either all files are written or none.

    Args:
        source: A run folder (its newest step), `RUN@STEP`, the folder of a checkpoint or of an export, or a
            .safetensors file.
        program: "diffusers", "comfyui" or "kohya".
        out: The new file, or an existing folder for it. None: beside a file, or `exports/PROGRAM` of the run. The name
            of the expert is added if there are several.
        base: The folder of the base model's pipeline, which a DoRA for ComfyUI needs; that of a run is known.
        family: The model family, if the names of the layers fit several.
        partial: Leave out unknown keys instead of raising ModelError.
        overwrite: Replace existing files.

    Raises:
        ModelError: The file is damaged or has unknown keys; the program cannot load this kind of adapter; a file
            exists; or the run has no such step.
        RunFolderError: `source` is a folder, and not that of a run.
    """
    from supertuner.train.export.run_adapters import denoiser_weight_files, is_run_source, open_run_adapter

    target = None if out is None else Path(out)
    with ExitStack() as stack:
        paths, base_files = [Path(source)], None
        if is_run_source(os.fspath(source)):
            adapter = stack.enter_context(open_run_adapter(os.fspath(source)))
            paths, base_files = list(adapter.files), adapter.base_weight_files
            if target is None:
                target = adapter.export_folder(program)
        if base is not None:
            base_files = partial_call(denoiser_weight_files, Path(base))
        files = [open_adapter_file(path, family=family, partial=partial) for path in paths]
        return _export_files(files, program, target, base_files, overwrite, family)


def loading_hint(exported: Sequence[AdapterConversion], program: str) -> str:
    """How the program loads the files that `export` wrote for it."""
    if program == "diffusers":
        later = later_experts()
        calls = []
        for done in exported:
            component = next(
                (part for name, part in later.items() if done.path.stem.endswith(f"_{name}.diffusers")), ""
            )
            flag = f", load_into_{component}=True" if component else ""
            calls.append(f'    pipe.load_lora_weights("{done.path}"{flag})')
        return "\n".join(["load them in Python:" if len(calls) > 1 else "load it in Python:", *calls])
    if program == "comfyui":
        where = "put it into ComfyUI/models/loras, and load it with the node LoraLoaderModelOnly after the model"
        if len(exported) > 1:
            where = (
                "put them into ComfyUI/models/loras, and load each with a node LoraLoaderModelOnly of its own, after "
                "the model of its expert (the name of the file says which)"
            )
        return where
    return "kohya's sd-scripts and musubi-tuner take these files as --network_weights"


def _export_files(
    files: Sequence[AdapterFile],
    program: str,
    out: Path | None,
    base_files: Callable[[AdapterFile], Sequence[Path]] | None,
    overwrite: bool,
    family: str | None,
) -> list[AdapterConversion]:
    from supertuner.train.export.adapter_export import export_adapters, needs_base_weights
    from supertuner.train.export.comfyui_dora import file_magnitude_factors

    sources = [
        (file, file_magnitude_factors(file, base_files(file)))
        if base_files is not None and needs_base_weights(file, program)
        else (file, None)
        for file in files
    ]
    exported = export_adapters(sources, program, out, overwrite=overwrite, family=family)
    return [
        AdapterConversion(
            done.path, done.tensors, done.source.reading.scheme.name, done.scheme.name, done.source.reading.summary()
        )
        for done in exported
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
