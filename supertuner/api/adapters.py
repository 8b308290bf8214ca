"""Inspects and loads adapter files of any program, writes them for other programs, and merges them into models."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial as partial_call
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from supertuner.config.families import expert_names
from supertuner.core.errors import ModelError, OptionError
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
from supertuner.train.export.loading_hints import comfyui_hint, diffusers_calls, kohya_hint

if TYPE_CHECKING:
    from torch import Tensor

    from supertuner.train.export.adapter_inspect import AdapterInspection
    from supertuner.train.export.hub_push import PushedAdapter

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
    from supertuner.train.export.adapter_export import export_files
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
        exported = export_files(files, program, target, base_files, overwrite=overwrite, family=family)
    return [
        AdapterConversion(
            done.path, done.tensors, done.source.reading.scheme.name, done.scheme.name, done.source.reading.summary()
        )
        for done in exported
    ]


def loading_hint(exported: Sequence[AdapterConversion], program: str) -> str:
    """How the program loads the files that `export` wrote for it."""
    if program == "diffusers":
        calls = [f"    {call}" for call in diffusers_calls([str(done.path) for done in exported])]
        return "\n".join(["load them in Python:" if len(calls) > 1 else "load it in Python:", *calls])
    return comfyui_hint(len(exported)) if program == "comfyui" else kohya_hint()


def push(
    source: PathLike,
    repository: str,
    *,
    programs: Sequence[str] = (),
    private: bool | None = None,
    license: str | None = None,
    trigger_word: str | None = None,
    overwrite: bool = False,
) -> PushedAdapter:
    """Push an adapter to the Hugging Face hub as one commit: its files, samples of its step, and a model card.

    The token is that of `hf auth login` or HF_TOKEN. If the hub has the same files already, there is no new commit.

    Args:
        source: A run folder (its newest step), `RUN@STEP`, the folder of a checkpoint or of an export, a .safetensors
            file, or a folder with a file per expert.
        repository: OWNER/NAME on the hub; created if it does not exist.
        programs: Further programs to push files for, besides `exports.formats` of the run: "comfyui", "kohya".
        private: Whether a new repository is private. None: `exports.hub_private` of the run, else private.
        license: The licence in the card, as the hub names it. None: `exports.license` of the run, else none.
        trigger_word: The trigger word in the card. None: that of the run, if it has one.
        overwrite: Replace a model card that SuperTuner did not write, or that was edited on the hub.

    Raises:
        HubError: There is no valid token, the hub refuses the push, or it cannot be reached.
        ModelError: There is no such adapter, or it cannot be written for a program.
        OptionError: `repository` is not OWNER/NAME, or `license` is not a name of a licence.
    """
    from pydantic import ValidationError

    from supertuner.config.settings import key_paths
    from supertuner.config.settings.train import ExportSettings
    from supertuner.config.settings.values import allowed_text, format_value
    from supertuner.train.export.hub_push import PushOptions, push_adapter

    settings: dict[str, str | None] = {"push_to_hub": repository, "license": license}
    try:
        ExportSettings.model_validate(settings)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        allowed = allowed_text(key_paths.settings()[f"exports.{name}"].schema)
        raise OptionError(f"{format_value(settings[name])} is not allowed; allowed: {allowed}") from error
    return push_adapter(
        os.fspath(source), repository, PushOptions(tuple(programs), private, license, trigger_word, overwrite)
    )


def push_summary(pushed: PushedAdapter) -> str:
    """What a push did, one line each."""
    visibility = "private" if pushed.is_private else "public"
    what = f"{len(pushed.files)} files" if pushed.has_new_commit else "unchanged: the hub has the same files"
    lines = [f"{pushed.url} ({visibility}): {what}"]
    if pushed.kept_card is not None:
        reason = "was edited there" if pushed.kept_card == "edited" else "is not one of SuperTuner's"
        lines.append(f"the model card on the hub {reason}, and is kept")
    elif pushed.license is None:
        lines.append("the model card names no licence: exports.license is not set")
    return "\n".join(lines)


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
