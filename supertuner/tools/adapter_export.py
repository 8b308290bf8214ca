"""An adapter's file for a program that loads it: which names, and one file per expert, all of them or none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from supertuner.core.errors import ModelError
from supertuner.models.keys import Name, write
from supertuner.models.keys_convert import layers_of
from supertuner.models.keys_modules import LAYOUTS, family_of_layers
from supertuner.models.keys_schemes import COMFYUI, DORA, SCHEMES, STYLES, Scheme
from supertuner.tools.adapter_inspect import has_dora, kind_of
from supertuner.train.adapter_files import ENDINGS, AdapterFile, convert, of_expert

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
            raise ModelError(f"{file.path} holds {', '.join(others)}; diffusers loads LoRA, lycoris-lora loads these")
    else:
        family = family or file.reading.family
        scheme = SCHEMES[COMFYUI[family_of_layers(family)]]
        if has_dora(file.reading):  # ComfyUI finds `dora_scale`, and passes over peft's word for it
            scheme = replace(scheme, spelling="kohya")
        if any(DORA in layer.keys for layer in layers_of(file.reading)):
            scheme = replace(scheme, spelling="kohya")  # it looks for `dora_scale`, and passes over peft's word for it
    experts = file.reading.experts
    paths = {expert: _place(file.path, out, program, expert, len(experts)) for expert in experts}
    there = [path for path in paths.values() if path.exists() and not overwrite]
    if there:
        raise ModelError(f"{there[0]} is there already; name another place with --out, or replace it with --force")
    made: list[tuple[Path, int]] = []
    try:
        for expert, path in paths.items():
            made.append((path, convert(of_expert(file, expert), scheme, path, overwrite=overwrite, family=family)))
    except BaseException:
        for path, _ in made:
            path.unlink(missing_ok=True)  # one expert without the other is no adapter
        raise
    return made


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
