"""Exports an adapter for another program: with its key names, one file per expert, and all files or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from supertuner.config.families import expert_names
from supertuner.core.durable import sync_folder, write_chunks
from supertuner.core.errors import ModelError
from supertuner.models.adapters.family_layers import FAMILY_LAYERS, family_layers
from supertuner.models.adapters.keys import AdapterKeyReading, AdapterTensorName, format_key, read_keys
from supertuner.models.adapters.keys_convert import Shape, adapter_layers, plan_conversion
from supertuner.models.adapters.keys_modules import fill_numbers
from supertuner.models.adapters.keys_schemes import ALPHA, KEY_SCHEMES, KeyScheme
from supertuner.train.export.adapter_files import (
    AdapterFile,
    convert_adapter,
    converted_metadata,
    load_adapter_tensors,
    publish_file,
    select_expert,
)
from supertuner.train.export.adapter_inspect import adapter_kind, has_dora

if TYPE_CHECKING:
    from supertuner.models.spec import Tensors

PROGRAMS: Final = ("diffusers", "comfyui", "kohya")


@dataclass(frozen=True, eq=False, slots=True)
class ExportedFile:
    """A file that was written for a program."""

    path: Path
    source: AdapterFile
    scheme: KeyScheme
    tensors: int


def export_adapter(
    file: AdapterFile,
    program: str,
    out: Path | None = None,
    *,
    overwrite: bool = False,
    family: str | None = None,
    magnitude_factors: Tensors | None = None,
) -> list[ExportedFile]:
    """Like `export_adapters`, for one file."""
    return export_adapters([(file, magnitude_factors)], program, out, overwrite=overwrite, family=family)


def export_adapters(
    sources: Sequence[tuple[AdapterFile, Tensors | None]],
    program: str,
    out: Path | None = None,
    *,
    overwrite: bool = False,
    family: str | None = None,
) -> list[ExportedFile]:
    """Write adapters for `program`, all or none. Each comes with the factors that a DoRA needs for ComfyUI (see
    `comfyui_dora`), or None.

    Each expert gets its own file, because diffusers expects the same key prefix for all experts. `out` is a file, to
    whose name the expert is added if there are several, or a folder. Raises ModelError if the program cannot load this
    kind of adapter, or if a file exists and `overwrite` is not set.
    """
    parts = [(select_expert(file, expert), factors) for file, factors in sources for expert in file.reading.experts]
    paths = [_output_path(part, out, program, len(parts)) for part, _ in parts]
    schemes = [_checked_scheme(part, program, family, factors is not None) for part, factors in parts]
    if not overwrite:
        _require_no_existing_files(paths)
    exported = []
    try:
        for (part, factors), path, (scheme, part_family) in zip(parts, paths, schemes, strict=True):
            hidden = _temporary_path(path)
            if factors is not None and needs_base_weights(part, program):
                count = _write_corrected_dora(part, scheme, hidden, part_family, factors)
            else:
                count = convert_adapter(part, scheme, hidden, overwrite=True, family=part_family)
            exported.append(ExportedFile(path, part, scheme, count))
        _publish_files(paths, overwrite)
    finally:
        for path in paths:
            _temporary_path(path).unlink(missing_ok=True)
    return exported


def export_files(
    files: Sequence[AdapterFile],
    program: str,
    out: Path | None,
    base_files: Callable[[AdapterFile], Sequence[Path]] | None,
    *,
    overwrite: bool = False,
    family: str | None = None,
) -> list[ExportedFile]:
    """Like `export_adapters`. `base_files` names the base weights of a file, from which the factors of a DoRA for
    ComfyUI are computed; None: they are not known."""
    from supertuner.train.export.comfyui_dora import file_magnitude_factors

    sources = [
        (file, file_magnitude_factors(file, base_files(file)))
        if base_files is not None and needs_base_weights(file, program)
        else (file, None)
        for file in files
    ]
    return export_adapters(sources, program, out, overwrite=overwrite, family=family)


def needs_base_weights(file: AdapterFile, program: str) -> bool:
    """Whether the base weights must be known to write the file for `program`; see `comfyui_dora`."""
    return program == "comfyui" and has_dora(file.reading)


def _checked_scheme(
    file: AdapterFile, program: str, family: str | None, has_magnitude_factors: bool
) -> tuple[KeyScheme, str]:
    try:
        scheme_and_family = _program_scheme(file.reading, program, family)
    except ModelError as error:
        raise ModelError(f"{file.path}: {error}") from error
    if needs_base_weights(file, program) and not has_magnitude_factors:
        raise ModelError(
            f"{file.path} is a DoRA. ComfyUI divides by the norm of the base weight instead of the changed weight, so "
            "it needs other magnitudes, and these need the base model; set `base` to the folder of its pipeline"
        )
    return scheme_and_family


def require_exportable(shapes: Mapping[str, Shape], program: str, family: str) -> None:
    """ModelError if an adapter with these tensors cannot be written for `program`."""
    reading = read_keys(shapes, family)
    if reading.unknown:  # they would be left out of the file
        raise ModelError(f"it has no name for {len(reading.unknown)} tensors, such as {next(iter(reading.unknown))}")
    scheme, _ = _program_scheme(reading, program, family)
    alphas = {key: 1.0 for key, name in reading.names.items() if name.tensor == ALPHA}
    plan_conversion(reading, shapes, alphas, {}, scheme, family)


def _program_scheme(reading: AdapterKeyReading, program: str, family: str | None) -> tuple[KeyScheme, str]:
    """The key scheme that the program reads, and the family. ModelError if it cannot load this kind of adapter."""
    if program not in PROGRAMS:
        raise ModelError(f"{program!r} is not a program to export for; choose from {', '.join(PROGRAMS)}")
    if program == "diffusers":
        unsupported_kinds = sorted({adapter_kind(layer) for layer in adapter_layers(reading) if not layer.is_lora})
        if unsupported_kinds:
            raise ModelError(
                f"it contains {', '.join(unsupported_kinds)}, but diffusers loads only LoRA; merge it into a model "
                "with `supertuner adapter merge`, or load it unchanged with lycoris-lora"
            )
        return KEY_SCHEMES["diffusers"], family or reading.families[0]
    family = family or reading.family
    if program == "kohya":
        return KEY_SCHEMES["kohya"], family
    scheme = KEY_SCHEMES[family_layers(family).comfyui_scheme]
    if has_dora(reading):  # ComfyUI reads `dora_scale` and ignores peft's name for it
        scheme = replace(scheme, spelling="kohya")
    return scheme, family


def _write_corrected_dora(file: AdapterFile, scheme: KeyScheme, out: Path, family: str, factors: Tensors) -> int:
    from supertuner.train.checkpoint.tensor_file import plan_tensor_file
    from supertuner.train.export.comfyui_dora import MAGNITUDES_FACT, correct_magnitudes

    tensors = load_adapter_tensors(file, scheme, family)
    tensors = correct_magnitudes(tensors, factors, scheme, family)
    metadata = converted_metadata(file, scheme, **MAGNITUDES_FACT)
    write_chunks(out, plan_tensor_file(tensors, metadata).chunks())
    return len(tensors)


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.exporting")


def _require_no_existing_files(paths: Sequence[Path]) -> None:
    existing = [path for path in paths if path.exists()]
    missing = [path for path in paths if path not in existing]
    if existing and missing:
        raise ModelError(
            f"{existing[0]} exists and {missing[0]} does not: an export may have been interrupted between them; "
            "replace both with `overwrite`, or choose another path with `out`"
        )
    if existing:
        raise ModelError(f"{existing[0]} exists; choose another path with `out`, or replace it with `overwrite`")


def _publish_files(paths: Sequence[Path], overwrite: bool) -> None:
    """Rename the temporary files to their final names. A kill in between leaves some files missing, and never mixes
    files of two exports."""
    for path in paths:
        if path.is_dir():
            raise ModelError(f"{path} is a folder; name a file with `out`")
    if overwrite and len(paths) == 1:
        os.replace(_temporary_path(paths[0]), paths[0])
    else:
        if overwrite:
            for path in paths:
                path.unlink(missing_ok=True)
        published: list[Path] = []
        try:
            for path in paths:
                publish_file(_temporary_path(path), path)
                published.append(path)
        except BaseException:
            for path in published:
                path.unlink()  # one expert without the others is not a complete adapter
            raise
    sync_folder(paths[0].parent)


def example_key(scheme: KeyScheme) -> str:
    """An example of a key in this scheme."""
    layout = next(iter(FAMILY_LAYERS.values()))
    row = next(row for row in layout.original_names if row.endswith(".to_q"))
    expert = list(layout.experts)[-1] if scheme.marks_experts else None
    return format_key(AdapterTensorName(expert, fill_numbers(row, ("0",)), "lora_A"), scheme, layout.family)


def _output_path(part: AdapterFile, out: Path | None, program: str, parts: int) -> Path:
    """Where the file of one expert is written."""
    if out is not None and parts == 1 and not out.is_dir():
        return out
    named = part.path if out is None or out.is_dir() else out
    stem, (expert,) = named.stem, part.reading.experts
    for name in expert_names():
        stem = stem.removesuffix(f"_{name}")
    file_name = f"{stem}.safetensors" if expert is None else f"{stem}_{expert}.safetensors"
    if out is None or out.is_dir():
        return program_path((out or part.path.parent) / file_name, program)
    return out.with_name(file_name)


def program_path(path: Path, program: str) -> Path:
    """The file beside `path` with the same adapter for `program`."""
    return path.with_name(f"{path.stem}.{program}.safetensors")
