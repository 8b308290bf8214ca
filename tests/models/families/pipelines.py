"""Tiny pipelines on disk, each written once per session. A conftest of another room imports the fixtures it wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from supertuner.models.families.flux import tiny as flux_tiny
from supertuner.models.families.flux.tiny import TinyFlux
from supertuner.models.families.qwen_image import tiny as qwen_image_tiny
from supertuner.models.families.qwen_image.tiny import TinyQwen
from supertuner.models.families.qwen_image_edit import tiny as qwen_image_edit_tiny
from supertuner.models.families.sd35 import tiny as sd35_tiny
from supertuner.models.families.sd35.tiny import TinySd35
from supertuner.models.families.sdxl import tiny as sdxl_tiny
from supertuner.models.families.sdxl.tiny import TinySdxl
from supertuner.models.families.wan22 import tiny as wan22_tiny
from supertuner.models.families.wan22.tiny import TinyWan
from supertuner.models.spec import Family, Model, PictureTextEncoder, Source, Tensors, TextEncoder
from supertuner.models.table import family


@dataclass(frozen=True)
class Case:
    """A family, one of its variants, and the shape of media that it takes."""

    name: str
    family: str
    build: Callable[[int], Any]
    shape: tuple[int, ...]
    unreached: tuple[str, ...] = ()
    """Beginnings of names of layers that lead to no output by design, so that no gradient reaches them."""
    last: str = "proj_out"
    """The denoiser's last layer."""
    seen: str = "proj_out"
    """A layer whose input has a row for each token."""
    off: int = 8
    """Pixels by which a side must not be longer or shorter."""


TEXT_OF_THE_LAST_BLOCK = tuple(
    f"transformer_blocks.1.{name}" for name in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp")
)
"""The last block's text is thrown away: only its keys and values lead to the picture."""

TEXT_QUERIES = ("transformer_blocks.1.attn.add_q_proj",)
"""The last block has no use for its text, and still projects its queries."""

OF_A_UNET: dict[str, Any] = {"last": "conv_out", "seen": "down_blocks.1.attentions.0.proj_out", "off": 4}


@dataclass(frozen=True)
class Written:
    """A variant's pipeline on disk, as its family reads it."""

    case: Case
    family: Family
    model: Model

    @property
    def folder(self) -> Path:
        return Path(self.model.source.path)

    def text_encoder(self, dtype: torch.dtype) -> TextEncoder:
        """The family's; of one that edits, all captions are about one picture."""
        encoder = self.family.text_encoder(self.model, torch.device("cpu"), dtype)
        return OfOnePicture(encoder) if isinstance(encoder, PictureTextEncoder) else encoder


class OfOnePicture:
    def __init__(self, encoder: PictureTextEncoder) -> None:
        self._encoder = encoder

    @property
    def cut(self) -> int:
        return self._encoder.cut

    def encode(self, captions: Sequence[str]) -> list[Tensors]:
        picture = torch.arange(3 * 64 * 32).reshape(3, 64, 32).to(torch.uint8)
        return self._encoder.encode_of(captions, [picture] * len(captions))


CASES = (
    Case("wan-t2v", "wan2.2", lambda seed: wan22_tiny.build(TinyWan(), seed), (3, 5, 32, 48)),
    Case("wan-one-expert", "wan2.2", lambda seed: wan22_tiny.build(TinyWan(experts=1), seed), (3, 1, 32, 48)),
    Case("wan-i2v", "wan2.2", lambda seed: wan22_tiny.build(TinyWan(kind="i2v"), seed), (3, 5, 32, 48)),
    Case("wan-5b", "wan2.2", lambda seed: wan22_tiny.build(TinyWan(kind="ti2v"), seed), (3, 5, 32, 64)),
    Case("flux-dev", "flux", lambda seed: flux_tiny.build(TinyFlux(), seed), (3, 32, 48)),
    Case("flux-schnell", "flux", lambda seed: flux_tiny.build(TinyFlux(guidance=False), seed), (3, 32, 48)),
    Case(
        "qwen-image",
        "qwen-image",
        lambda seed: qwen_image_tiny.build(TinyQwen(), seed),
        (3, 32, 48),
        unreached=TEXT_OF_THE_LAST_BLOCK,
    ),
    Case("sd3.5", "sd3.5", lambda seed: sd35_tiny.build(TinySd35(), seed), (3, 32, 48), unreached=TEXT_QUERIES),
    Case("sd3", "sd3.5", lambda seed: sd35_tiny.build(TinySd35("3"), seed), (3, 32, 48), unreached=TEXT_QUERIES),
    Case("sdxl", "sdxl", lambda seed: sdxl_tiny.build(TinySdxl(), seed), (3, 32, 48), **OF_A_UNET),
    Case("sdxl-v", "sdxl", lambda seed: sdxl_tiny.build(TinySdxl("v"), seed), (3, 40, 48), **OF_A_UNET),
)

EDITING = Case(
    "qwen-image-edit",
    "qwen-image-edit",
    lambda seed: SimpleNamespace(save_pretrained=lambda folder: qwen_image_edit_tiny.write(folder, TinyQwen(), seed)),
    (3, 32, 48),
    unreached=TEXT_OF_THE_LAST_BLOCK,
)
"""Its own pipeline wants torchvision to be loaded; it is held against that in tests of its own."""


@pytest.fixture(scope="session", params=CASES, ids=lambda case: case.name)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Every variant of every family in turn."""
    case: Case = request.param
    source = _saved(tmp_path_factory, case.name)
    return Written(case, family(case.family), family(case.family).read(source))


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Text to video, two experts."""
    return _saved(tmp_path_factory, "wan-t2v")


@pytest.fixture(scope="session")
def tiny_wan_image_to_video(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return _saved(tmp_path_factory, "wan-i2v")


@pytest.fixture(scope="session")
def tiny_wan_5b(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """One expert, a timestep per token."""
    return _saved(tmp_path_factory, "wan-5b")


@pytest.fixture(scope="session")
def tiny_flux(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return _saved(tmp_path_factory, "flux-dev")


def _saved(factory: pytest.TempPathFactory, name: str) -> Source:
    folder = factory.getbasetemp() / "pipelines" / name
    if not folder.is_dir():
        case = next(case for case in (*CASES, EDITING) if case.name == name)
        case.build(0).save_pretrained(folder)
    return Source(str(folder))
