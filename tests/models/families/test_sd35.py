"""SD3 and SD3.5 beyond the contract: three text encoders, limited positions, and the title."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from supertuner.core.errors import ModelError
from supertuner.models.attention import require_backend_support
from supertuner.models.families.sd35.family import tiny_sd35_pipeline
from supertuner.models.families.tiny_pipelines import write_pipeline
from supertuner.models.family_loader import load_family
from supertuner.models.spec import ModelDescription, ModelSource
from tests.models.families.test_family_contract import CPU

SD35 = load_family("sd3.5")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pipeline(tiny_sd35_pipeline, tmp_path / "sd35", 0)
    return tmp_path / "sd35"


@pytest.fixture
def model(folder: Path) -> ModelDescription:
    return SD35.read_model(ModelSource(str(folder)))


def test_a_caption_has_rows_of_two_clips_and_rows_of_t5(model: ModelDescription) -> None:
    fields = SD35.build_text_encoder(model, CPU, torch.float32).encode(["a red circle"])[0]
    assert fields["embeds"].shape == (77 + 256, 32) and fields["pooled"].shape == (8 + 16,)
    assert not fields["embeds"][:77, 8 + 16 :].any(), "both CLIPs side by side are narrower than T5"
    assert fields["embeds"][:77, : 8 + 16].any() and fields["embeds"][77:].any()


def test_an_image_beyond_the_models_positions_gets_a_reason(model: ModelDescription) -> None:
    """The tiny model has 16 positions of 16 pixels along each side, the published ones 192 and 384."""
    assert SD35.unsupported_reason(model, (3, 256, 256)) is None
    assert (
        SD35.unsupported_reason(model, (3, 256, 272))
        == "it is 272×256, and this model has positions for at most 256 pixels per side"
    )


def test_the_title_names_the_version(model: ModelDescription, tmp_path: Path) -> None:
    write_pipeline(partial(tiny_sd35_pipeline, "3"), tmp_path / "sd3", 0)
    assert (model.title, SD35.read_model(ModelSource(str(tmp_path / "sd3"))).title) == (
        "Stable Diffusion 3.5",
        "Stable Diffusion 3",
    )


def test_the_shift_is_that_of_the_scheduler(folder: Path) -> None:
    config = folder / "scheduler" / "scheduler_config.json"
    assert SD35.read_model(ModelSource(str(folder))).shift == 3.0
    facts = json.loads(config.read_text())
    config.write_text(json.dumps(facts | {"use_dynamic_shifting": True, "max_shift": 1.16}))
    assert SD35.read_model(ModelSource(str(folder))).shift == pytest.approx(math.exp(1.16))


def test_an_attention_backend_that_its_layers_do_not_support_raises_an_error(model: ModelDescription) -> None:
    with pytest.raises(ModelError, match="SD3Transformer2DModel supports only torch's own attention"):
        require_backend_support(SD35.load_denoiser(model, model.experts[0], torch.float32), "_native_math")
