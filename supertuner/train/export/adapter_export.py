"""Exports an adapter for another program: with its key names, one file per expert, and all files or none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from supertuner.config.families import expert_names
from supertuner.core.durable import sync_folder
from supertuner.core.errors import ModelError
from supertuner.models.adapters.family_layers import FAMILY_LAYERS, family_layers
from supertuner.models.adapters.keys import AdapterTensorName, format_key
from supertuner.models.adapters.keys_convert import adapter_layers
from supertuner.models.adapters.keys_modules import fill_numbers
from supertuner.models.adapters.keys_schemes import KEY_SCHEMES, KeyScheme
from supertuner.train.export import adapter_files
from supertuner.train.export.adapter_files import AdapterFile
from supertuner.train.export.adapter_inspect import adapter_kind, has_dora

PROGRAMS: Final = ("diffusers", "comfyui")


def export_adapter(
    file: AdapterFile, program: str, out: Path | None = None, *, overwrite: bool = False, family: str | None = None
) -> tuple[KeyScheme, dict[Path, int]]:
    """Write the adapter for `program`. Returns (the key scheme, written file → number of its tensors).

    Each expert gets its own file, because diffusers expects the same key prefix for all experts. Raises ModelError if
    the program cannot load this kind of adapter, or if a file exists and `overwrite` is not set.
    """
    if program not in PROGRAMS:
        raise ModelError(f"{program!r} is not a program to export for; choose from {', '.join(PROGRAMS)}")
    if program == "diffusers":
        scheme, family = KEY_SCHEMES["diffusers"], family or file.reading.families[0]
        unsupported_kinds = sorted({adapter_kind(layer) for layer in adapter_layers(file.reading) if not layer.is_lora})
        if unsupported_kinds:
            raise ModelError(
                f"{file.path} contains {', '.join(unsupported_kinds)}, but diffusers loads only LoRA; merge it into a "
                "model with `supertuner adapter merge`, or load it unchanged with lycoris-lora"
            )
    else:
        family = family or file.family
        scheme = KEY_SCHEMES[family_layers(family).comfyui_scheme]
        if has_dora(file.reading):  # ComfyUI reads `dora_scale` and ignores peft's name for it
            scheme = replace(scheme, spelling="kohya")
    experts = file.reading.experts
    paths = {expert: _output_path(file.path, out, program, expert, len(experts)) for expert in experts}
    if not overwrite:
        _require_no_existing_files(list(paths.values()))
    counts = {}
    try:
        for expert, path in paths.items():
            part = adapter_files.select_expert(file, expert)
            counts[path] = adapter_files.convert_adapter(
                part, scheme, _temporary_path(path), overwrite=True, family=family
            )
        _publish_files(list(paths.values()), overwrite)
    finally:
        for path in paths.values():
            _temporary_path(path).unlink(missing_ok=True)
    return scheme, counts


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
                adapter_files.publish_file(_temporary_path(path), path)
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


def _output_path(source: Path, out: Path | None, program: str, expert: str | None, experts: int) -> Path:
    if out is not None and experts == 1:
        return out
    base = source.stem if out is None else out.stem
    for name in expert_names():
        base = base.removesuffix(f"_{name}")
    stem = f"{base}_{expert}" if expert is not None else base
    folder = source.parent if out is None else out.parent
    return folder / (f"{stem}.{program}.safetensors" if out is None else f"{stem}.safetensors")
