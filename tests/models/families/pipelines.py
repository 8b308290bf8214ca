"""Tiny pipelines on disk, each written once per session. A conftest of another package imports the fixtures it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from supertuner.models.families.flux.family import tiny_flux_pipeline
from supertuner.models.families.qwen_image.tiny import tiny_qwen_pipeline
from supertuner.models.families.qwen_image_edit import family as qwen_image_edit
from supertuner.models.families.sd35.family import tiny_sd35_pipeline
from supertuner.models.families.sdxl.family import tiny_sdxl_pipeline
from supertuner.models.families.tiny_pipelines import build_pipeline
from supertuner.models.families.wan22.family import tiny_wan_pipeline
from supertuner.models.family_loader import load_family
from supertuner.models.spec import Family, ImageTextEncoder, ModelDescription, ModelSource, Tensors, TextEncoder


@dataclass(frozen=True)
class FamilyCase:
    """A variant of a family, and a shape of media that it supports."""

    name: str
    family: str
    build: Callable[[int], Any]
    shape: tuple[int, ...]
    without_gradient: tuple[str, ...] = ()
    """Prefixes of layers that by design do not influence the output, so that they get no gradient."""
    last_layer: str = "proj_out"
    """The denoiser's last layer."""
    token_layer: str = "proj_out"
    """A layer whose input has one row per token."""
    forbidden_offset: int = 8
    """Changing a side by this number of pixels makes it unsupported."""


LAST_BLOCK_TEXT_LAYERS = tuple(
    f"transformer_blocks.1.{name}" for name in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp")
)
"""The text output of the last block is unused: only its keys and values influence the image."""

TEXT_QUERIES = ("transformer_blocks.1.attn.add_q_proj",)
"""The last block computes text queries but does not use the result."""

UNET_OPTIONS: dict[str, Any] = {
    "last_layer": "conv_out",
    "token_layer": "down_blocks.1.attentions.0.proj_out",
    "forbidden_offset": 4,
}


@dataclass(frozen=True)
class WrittenPipeline:
    """A variant's pipeline on disk, and its description."""

    case: FamilyCase
    family: Family
    model: ModelDescription

    @property
    def folder(self) -> Path:
        return Path(self.model.source.path)

    def text_encoder(self, dtype: torch.dtype) -> TextEncoder:
        """The family's text encoder; that of an editing model gets the same image with every caption."""
        encoder = self.family.build_text_encoder(self.model, torch.device("cpu"), dtype)
        return SingleImageTextEncoder(encoder) if isinstance(encoder, ImageTextEncoder) else encoder


class SingleImageTextEncoder:
    def __init__(self, encoder: ImageTextEncoder) -> None:
        self._encoder = encoder

    @property
    def truncated_captions(self) -> int:
        return self._encoder.truncated_captions

    def encode(self, captions: Sequence[str]) -> list[Tensors]:
        image = torch.arange(3 * 64 * 32).reshape(3, 64, 32).to(torch.uint8)
        return self._encoder.encode_with_images(captions, [image] * len(captions))


CASES = (
    FamilyCase("wan-t2v", "wan2.2", partial(build_pipeline, tiny_wan_pipeline), (3, 5, 32, 48)),
    FamilyCase(
        "wan-one-expert",
        "wan2.2",
        partial(build_pipeline, partial(tiny_wan_pipeline, experts=1)),
        (3, 1, 32, 48),
    ),
    FamilyCase("wan-i2v", "wan2.2", partial(build_pipeline, partial(tiny_wan_pipeline, kind="i2v")), (3, 5, 32, 48)),
    FamilyCase("wan-5b", "wan2.2", partial(build_pipeline, partial(tiny_wan_pipeline, kind="ti2v")), (3, 5, 32, 64)),
    FamilyCase("flux-dev", "flux", partial(build_pipeline, tiny_flux_pipeline), (3, 32, 48)),
    FamilyCase(
        "flux-schnell",
        "flux",
        partial(build_pipeline, partial(tiny_flux_pipeline, guidance=False)),
        (3, 32, 48),
    ),
    FamilyCase(
        "qwen-image",
        "qwen-image",
        partial(build_pipeline, tiny_qwen_pipeline),
        (3, 32, 48),
        without_gradient=LAST_BLOCK_TEXT_LAYERS,
    ),
    FamilyCase(
        "sd3.5",
        "sd3.5",
        partial(build_pipeline, tiny_sd35_pipeline),
        (3, 32, 48),
        without_gradient=TEXT_QUERIES,
    ),
    FamilyCase(
        "sd3",
        "sd3.5",
        partial(build_pipeline, partial(tiny_sd35_pipeline, "3")),
        (3, 32, 48),
        without_gradient=TEXT_QUERIES,
    ),
    FamilyCase("sdxl", "sdxl", partial(build_pipeline, tiny_sdxl_pipeline), (3, 32, 48), **UNET_OPTIONS),
    FamilyCase(
        "sdxl-v",
        "sdxl",
        partial(build_pipeline, partial(tiny_sdxl_pipeline, "v")),
        (3, 40, 48),
        **UNET_OPTIONS,
    ),
)

EDIT_CASE = FamilyCase(
    "qwen-image-edit",
    "qwen-image-edit",
    lambda seed: SimpleNamespace(save_pretrained=lambda folder: qwen_image_edit.write_pipeline(folder, seed)),
    (3, 32, 48),
    without_gradient=LAST_BLOCK_TEXT_LAYERS,
)
"""Its diffusers pipeline needs torchvision; test_qwen_image_edit.py compares with it."""


@pytest.fixture(scope="session", params=CASES, ids=lambda case: case.name)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> WrittenPipeline:
    """Each variant of each family."""
    case: FamilyCase = request.param
    source = _write_once(tmp_path_factory, case.name)
    return WrittenPipeline(case, load_family(case.family), load_family(case.family).read_model(source))


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """Text-to-video with two experts."""
    return _write_once(tmp_path_factory, "wan-t2v")


@pytest.fixture(scope="session")
def tiny_wan_image_to_video(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return _write_once(tmp_path_factory, "wan-i2v")


@pytest.fixture(scope="session")
def tiny_wan_5b(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """One expert, with one timestep per token."""
    return _write_once(tmp_path_factory, "wan-5b")


@pytest.fixture(scope="session")
def tiny_flux(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return _write_once(tmp_path_factory, "flux-dev")


def _write_once(factory: pytest.TempPathFactory, name: str) -> ModelSource:
    folder = factory.getbasetemp() / "pipelines" / name
    if not folder.is_dir():
        case = next(case for case in (*CASES, EDIT_CASE) if case.name == name)
        case.build(0).save_pretrained(folder)
    return ModelSource(str(folder))
