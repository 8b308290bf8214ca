"""The table of model families. A new family is one folder in `families/` and its lines here."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from typing import Final

from supertuner.core.errors import ModelError
from supertuner.models.spec import Family

FAMILY_MODULES: Final[Mapping[str, str]] = {
    "flux": "supertuner.models.families.flux.family:FAMILY",
    "qwen-image": "supertuner.models.families.qwen_image.family:FAMILY",
    "qwen-image-edit": "supertuner.models.families.qwen_image_edit.family:FAMILY",
    "sd3.5": "supertuner.models.families.sd35.family:FAMILY",
    "sdxl": "supertuner.models.families.sdxl.family:FAMILY",
    "wan2.2": "supertuner.models.families.wan22.family:FAMILY",
}

FAMILY_BY_PIPELINE: Final[Mapping[str, str]] = {
    "FluxPipeline": "flux",
    "QwenImageEditPipeline": "qwen-image-edit",
    "QwenImagePipeline": "qwen-image",
    "StableDiffusion3Pipeline": "sd3.5",
    "StableDiffusionXLPipeline": "sdxl",
    "WanImageToVideoPipeline": "wan2.2",
    "WanPipeline": "wan2.2",
}
"""Class name of a diffusers pipeline → family."""


def load_family(name: str | None) -> Family:
    """The family with this name. Imports its libraries. Raises ModelError with the known names if there is none."""
    if name is None or name not in FAMILY_MODULES:
        value = "not set" if name is None else repr(name)
        raise ModelError(f"model.family is {value}; set it to one of {', '.join(FAMILY_MODULES)}")
    module, attribute = FAMILY_MODULES[name].split(":")
    disabled_level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # on import, the libraries log which of their optional dependencies are missing
    try:
        loaded = getattr(import_module(module), attribute)
    finally:
        logging.disable(disabled_level)
    assert isinstance(loaded, Family)
    return loaded
