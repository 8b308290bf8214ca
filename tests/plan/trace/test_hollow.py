"""Models built without weights have the shapes, types and encoder outputs of loaded models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from supertuner.config.settings.model import ModelSettings
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import ModelError
from supertuner.models import loading
from supertuner.models.blocks import named_blocks
from supertuner.models.published_models import PUBLISHED, describe_model
from supertuner.plan.trace.encoder_shapes import EncoderShapeProbe, without_weights
from tests.models.families.pipelines import WrittenPipeline

BILLIONS = {
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": {"transformer": 14.29, "vae": 0.127, "text_encoder": 5.68},
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": {"transformer": 14.29, "transformer_2": 14.29},
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": {"transformer": 5.00, "vae": 0.705},
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": {"transformer": 1.42},
    "Qwen/Qwen-Image": {"transformer": 20.43, "text_encoder": 8.29},
    "Qwen/Qwen-Image-Edit": {"transformer": 20.43},
    "black-forest-labs/FLUX.1-dev": {"transformer": 11.90, "text_encoder": 0.123, "text_encoder_2": 4.76},
    "stabilityai/stable-diffusion-3.5-medium": {"transformer": 2.24, "text_encoder_2": 0.695},
    "stabilityai/stable-diffusion-3.5-large": {"transformer": 8.06},
    "stabilityai/stable-diffusion-xl-base-1.0": {"unet": 2.567, "vae": 0.0837},
}
"""Numbers of parameters as published by the authors, in billions."""


def tensors(module: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (one.shape, one.dtype) for name, one in (*module.named_parameters(), *module.named_buffers())}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_module_built_without_weights_has_the_tensors_of_a_loaded_one(
    written: WrittenPipeline, dtype: torch.dtype
) -> None:
    for part in written.model.configs:
        if part and not part.startswith(("tokenizer", "scheduler")):
            loaded = loading.load_module(written.model, part, dtype)
            weightless = loading.load_module(without_weights(written.model), part, dtype)
            assert tensors(weightless) == tensors(loaded), part
            assert all(one.is_meta for one in weightless.parameters()), part


def test_probed_shapes_of_any_size_are_those_of_the_real_encoders(written: WrittenPipeline) -> None:
    family, model = written.family, written.model
    probe = EncoderShapeProbe(RunConfig(), family, model)
    encoder = family.build_media_encoder(model, torch.device("cpu"))
    *leading, height, width = written.case.shape
    longer = [leading, [*leading[:1], 9]] if len(leading) == 2 else [leading]
    for front in longer:
        for shape in ((*front, height, width), (*front, 2 * height, 3 * width)):
            if family.unsupported_reason(model, shape):
                continue
            encoded = encoder.encode(torch.zeros(1, *shape, dtype=torch.uint8))
            specs = probe.encoded_specs(shape)
            assert {name: one.shape for name, one in specs.items()} == {
                name: tuple(one.shape[1:]) for name, one in encoded.items()
            }


def test_probed_text_shapes_are_those_of_the_longest_caption(written: WrittenPipeline) -> None:
    family, model = written.family, written.model
    caption = "word " * 2000
    one = written.text_encoder(torch.float32).encode([caption])[0]
    padded = family.pad_text(model, [one])
    specs = EncoderShapeProbe(RunConfig(), family, model).text_specs(1)
    assert {name: field.shape for name, field in specs.items()} == {
        name: tuple(tensor.shape[1:]) for name, tensor in padded.items()
    }


@pytest.mark.parametrize("name", BILLIONS)
def test_a_published_model_has_the_published_number_of_parameters(name: str) -> None:
    family = PUBLISHED[name].family
    _, model, known = describe_model(ModelSettings.model_validate({"family": family, "path": name}))
    assert "nothing was downloaded" in known
    for part, billions in BILLIONS[name].items():
        module = loading.load_module(model, part, torch.bfloat16)
        assert sum(one.numel() for one in module.parameters()) / 1e9 == pytest.approx(billions, rel=0.002), part


def test_every_published_model_is_read_by_its_family() -> None:
    for name, known in PUBLISHED.items():
        family, model, _ = describe_model(ModelSettings.model_validate({"family": known.family, "path": name}))
        assert model.source.without_weights and model.source.path == name
        for expert in model.experts:
            assert named_blocks(loading.build_meta_module(model, expert.component)), name
        assert (
            family.unsupported_reason(model, (3, 81, 704, 1280) if family.name == "wan2.2" else (3, 1024, 1024)) is None
        )


def test_the_error_for_an_unknown_name_suggests_a_similar_one() -> None:
    settings = ModelSettings(family="flux", path="black-forest-labs/FLUX.1-dew")
    with pytest.raises(ModelError, match=r"did you mean black-forest-labs/FLUX\.1-dev"):
        describe_model(settings)


def test_the_error_for_an_unknown_model_lists_the_known_ones_of_its_family() -> None:
    with pytest.raises(ModelError, match=r"models of sdxl: .*stable-diffusion-xl-base.* config files"):
        describe_model(ModelSettings(family="sdxl", path="someone/else"))


def test_blocks_of_a_unet_come_in_the_order_of_its_forward_pass() -> None:
    _, model, _ = describe_model(ModelSettings(family="sdxl", path="stabilityai/stable-diffusion-xl-base-1.0"))
    names = list(named_blocks(loading.build_meta_module(model, "unet")))
    assert names == [*(f"down_blocks.{n}" for n in range(3)), "mid_block", *(f"up_blocks.{n}" for n in range(3))]
