"""How other programs load exported adapter files, as text for the console and for model cards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from supertuner.config.families import later_experts


def diffusers_calls(files: Sequence[str], repository: str | None = None) -> Iterator[str]:
    """The Python call that loads each file into diffusers' pipeline `pipe`, from a path or from a repository."""
    for file in files:
        stem = PurePath(file).stem.removesuffix(".diffusers")
        component = next((part for name, part in later_experts().items() if stem.endswith(f"_{name}")), "")
        source = f'"{file}"' if repository is None else f'"{repository}", weight_name="{file}"'
        yield f"pipe.load_lora_weights({source}{f', load_into_{component}=True' if component else ''})"


def comfyui_hint(count: int) -> str:
    """What to do with `count` files of one adapter in ComfyUI."""
    if count > 1:
        return (
            "put them into ComfyUI/models/loras, and load each with a node LoraLoaderModelOnly of its own, after "
            "the model of its expert (the name of the file says which)"
        )
    return "put it into ComfyUI/models/loras, and load it with the node LoraLoaderModelOnly after the model"


def kohya_hint() -> str:
    return "kohya's sd-scripts and musubi-tuner take these files as --network_weights"
