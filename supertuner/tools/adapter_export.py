"""An adapter's file for a program that loads it: which names, and one file per expert, all of them or none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from supertuner.core.durable import sync_folder
from supertuner.core.errors import ModelError
from supertuner.models.adapters.keys import Name, write
from supertuner.models.adapters.keys_convert import layers_of
from supertuner.models.adapters.keys_modules import LAYOUTS, family_of_layers
from supertuner.models.adapters.keys_schemes import COMFYUI, SCHEMES, STYLES, Scheme
from supertuner.tools.adapter_inspect import has_dora, kind_of
from supertuner.train.export.adapter_files import ENDINGS, AdapterFile, convert, of_expert, put

PROGRAMS: Final = ("diffusers", "comfyui")


def export(
    file: AdapterFile, program: str, out: Path | None = None, *, overwrite: bool = False, family: str | None = None
) -> list[tuple[Path, int]]:
    """(file, tensors in it) of each file written. Diffusers wants the same prefix for both experts, in two files."""
    if program not in PROGRAMS:
        raise ModelError(f"--for is {program!r}; there are {', '.join(PROGRAMS)}")
    if program == "diffusers":
        scheme, family = SCHEMES["diffusers"], family or file.reading.families[0]
        others = sorted({kind_of(layer) for layer in layers_of(file.reading) if not layer.is_lora})
        if others:
            raise ModelError(
                f"{file.path} holds {', '.join(others)}, and diffusers loads LoRA; `supertuner adapter merge` puts it "
                "into a model's folder, and lycoris-lora loads it as it is"
            )
    else:
        family = family or file.family
        scheme = SCHEMES[COMFYUI[family_of_layers(family)]]
        if has_dora(file.reading):  # ComfyUI finds `dora_scale`, and passes over peft's word for it
            scheme = replace(scheme, spelling="kohya")
    experts = file.reading.experts
    paths = {expert: _place(file.path, out, program, expert, len(experts)) for expert in experts}
    if not overwrite:
        _refuse_what_is_there(list(paths.values()))
    counts = {}
    try:
        for expert, path in paths.items():
            part = of_expert(file, expert)
            counts[path] = convert(part, scheme, _staged(path), overwrite=True, family=family)
        _appear(list(paths.values()), overwrite)
    finally:
        for path in paths.values():
            _staged(path).unlink(missing_ok=True)
    return list(counts.items())


def _staged(path: Path) -> Path:
    return path.with_name(f".{path.name}.exporting")


def _refuse_what_is_there(paths: Sequence[Path]) -> None:
    there = [path for path in paths if path.exists()]
    missing = [path for path in paths if path not in there]
    if there and missing:
        raise ModelError(
            f"{there[0]} is there and {missing[0]} is not: an export may have been interrupted between them; write "
            "both anew with --force, or name another place with --out"
        )
    if there:
        raise ModelError(f"{there[0]} is there already; name another place with --out, or replace it with --force")


def _appear(paths: Sequence[Path], overwrite: bool) -> None:
    """Whole files get their names. A kill in between leaves a name without a file, never two files of two exports."""
    for path in paths:
        if path.is_dir():
            raise ModelError(f"{path} is a folder; name a file with --out")
    if overwrite and len(paths) == 1:
        os.replace(_staged(paths[0]), paths[0])
    else:
        if overwrite:
            for path in paths:
                path.unlink(missing_ok=True)
        done: list[Path] = []
        try:
            for path in paths:
                put(_staged(path), path)
                done.append(path)
        except BaseException:
            for path in done:
                path.unlink()  # one expert without the other is no adapter
            raise
    sync_folder(paths[0].parent)


def example(scheme: Scheme) -> str:
    """A key of the scheme, for people."""
    expert = list(STYLES[scheme.style].prefixes)[-1]
    return write(Name(expert, "blocks.0.attn1.to_q", "lora_A"), scheme, LAYOUTS["wan2.2"].family)


def _place(source: Path, out: Path | None, program: str, expert: str | None, experts: int) -> Path:
    if out is not None and experts == 1:
        return out
    base = source.stem if out is None else out.stem
    for end in ENDINGS:
        base = base.removesuffix(end)
    named = f"{base}_{expert}" if expert is not None else base
    folder = source.parent if out is None else out.parent
    return folder / (f"{named}.{program}.safetensors" if out is None else f"{named}.safetensors")
