"""Qwen-Image-Edit against its diffusers pipeline: equal inputs, predictions and samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen2VLProcessor

from supertuner.config.settings.model import AdapterSettings
from supertuner.core.errors import ModelError
from supertuner.models.adapters.attach import attach, export_tensors, resolve_targets
from supertuner.models.families.qwen_image.encoders import IMAGE_EDIT
from supertuner.models.families.qwen_image_edit.encoders import load_processor
from supertuner.models.families.qwen_image_edit.family import FAMILY
from supertuner.models.families.sampling_common import pipeline_components
from supertuner.models.spec import ImageTextEncoder, ModelDescription, ModelSource, SampleRequest, Tensors
from tests.models.families.test_exported_samples import DecodedOutputs, with_trained_values
from tests.models.families.test_family_contract import media
from tests.models.families.test_like_the_pipeline import CapturedCalls

CPU = torch.device("cpu")
PROMPT = "make the {red} circle  blue"
SOURCE = media((3, 64, 32), 1, seed=4)[0]
"""A reference image that is taller than the sample."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelDescription:
    folder = tmp_path_factory.mktemp("edit") / "pipeline"
    FAMILY.write_tiny_pipeline(folder, 0)
    return FAMILY.read_model(ModelSource(str(folder)))


@pytest.fixture
def pipeline(model: ModelDescription, monkeypatch: pytest.MonkeyPatch) -> QwenImageEditPipeline:
    """The diffusers pipeline with components that are loaded as ours: its own loader needs torchvision for the
    processor. Its resizing is patched to keep the size of the reference image."""
    made = QwenImageEditPipeline(**pipeline_components(model, {}, CPU, torch.float32), processor=load_processor(model))
    made.set_progress_bar_config(disable=True)
    own_size = (SOURCE.shape[2], SOURCE.shape[1], None)
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda _area, _ratio: own_size)
    return made


def run(pipeline: QwenImageEditPipeline, scale: float = 1.0, **options: Any) -> Any:
    return pipeline(
        image=image_of_source(),
        prompt=PROMPT,
        negative_prompt="blurred" if scale > 1 else None,
        true_cfg_scale=scale,
        height=32,
        width=48,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(3),
        **options,
    )


def image_of_source() -> Image.Image:
    return Image.fromarray(SOURCE.permute(1, 2, 0).contiguous().numpy())


def request(**changed: Any) -> SampleRequest:
    image = np.asarray(image_of_source())
    given = {"width": 48, "height": 32, "frames": 1, "inference_steps": 3, "guidance_scale": 3.0, "image": image}
    return SampleRequest(PROMPT, "blurred", 3, **(given | changed))


def encode_text(model: ModelDescription, captions: list[str], dtype: torch.dtype = torch.float32) -> list[Tensors]:
    encoder = FAMILY.build_text_encoder(model, CPU, dtype)
    assert isinstance(encoder, ImageTextEncoder)
    return encoder.encode_with_images(captions, [SOURCE] * len(captions))


def condition(model: ModelDescription) -> Tensors:
    return {"condition": FAMILY.build_media_encoder(model, CPU).encode(SOURCE[None])["latents"]}


def test_inputs_and_predictions_equal_those_in_the_pipeline(
    model: ModelDescription, pipeline: QwenImageEditPipeline
) -> None:
    theirs = CapturedCalls(pipeline, ["transformer"])
    run(pipeline)
    module = FAMILY.load_denoiser(model, model.experts[0], torch.float32)
    ours = CapturedCalls(_Holder(module), ["transformer"])
    text, conditions = FAMILY.pad_text(model, encode_text(model, [PROMPT])), condition(model)
    assert len(theirs.calls) == 3
    for _, given, output in theirs.calls:
        tokens = (32 // 16) * (48 // 16)
        noisy = pipeline._unpack_latents(given["hidden_states"][:, :tokens], 32, 48, 8)[:, :, 0]
        with torch.no_grad():
            said = FAMILY.denoise(model, module, noisy, given["timestep"], text, conditions)
        _, mine, _ = ours.calls[-1]
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(mine[name], value), name
        assert [list(map(tuple, one)) for one in mine["img_shapes"]] == given["img_shapes"]
        expected = pipeline._unpack_latents(output[:, :tokens], 32, 48, 8)[:, :, 0]
        torch.testing.assert_close(said, expected, rtol=1e-4, atol=1e-5)


class _Holder:
    def __init__(self, transformer: nn.Module) -> None:
        self.transformer = transformer


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_sample_equals_that_of_the_pipeline_to_the_bit(
    model: ModelDescription, pipeline: QwenImageEditPipeline, scale: float
) -> None:
    made = run(pipeline, scale, output_type="np").images
    sample = FAMILY.build_sampler(model, {}, CPU, torch.float32).sample(request(guidance_scale=scale))
    assert np.array_equal(sample, (made * 255).round().astype(np.uint8))


def test_an_exported_adapter_gives_the_trainers_samples(
    model: ModelDescription, pipeline: QwenImageEditPipeline, tmp_path: Path
) -> None:
    settings = AdapterSettings(rank=4, alpha=2.0, targets="all_linear")
    decoded = DecodedOutputs(pipeline.vae)
    run(pipeline, 3.0, output_type="np")
    bare = decoded.take()
    module = FAMILY.load_denoiser(model, model.experts[0], torch.float32)
    trained = with_trained_values(
        attach(module, settings, resolve_targets(settings, FAMILY.target_presets), seed=1, name="model")
    )
    save_file(export_tensors(trained, "transformer", settings)[0], tmp_path / "adapter.safetensors")
    pipeline.load_lora_weights(tmp_path / "adapter.safetensors")
    run(pipeline, 3.0, output_type="np")
    sampler: Any = FAMILY.build_sampler(model, {"transformer": trained.module}, CPU, torch.float32)
    own = DecodedOutputs(sampler._vae)
    sampler.sample(request())
    ours, theirs = own.take(), decoded.take()
    assert (ours - bare).abs().max() > 1e-2, "the adapter does something"
    assert (ours - theirs).abs().max() < 1e-5


def test_prompts_are_processed_as_by_the_pipelines_processor(model: ModelDescription) -> None:
    """That class cannot be created without torchvision, but its handling of text and images does not need it."""
    ours = load_processor(model)
    real: Any = Qwen2VLProcessor.__new__(Qwen2VLProcessor)
    real.image_processor, real.tokenizer, real.video_processor = ours._image_processor, ours._tokenizer, None
    real.image_token, real.video_token = "<|image_pad|>", "<|video_pad|>"
    real.image_token_id, real.video_token_id = map(
        ours._tokenizer.convert_tokens_to_ids, ("<|image_pad|>", "<|video_pad|>")
    )
    given: dict[str, Any] = {
        "text": [IMAGE_EDIT.with_caption(PROMPT)],
        "images": image_of_source(),
        "padding": True,
        "return_tensors": "pt",
    }
    theirs, mine = real(**given), ours(**given)
    for name in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw"):
        assert torch.equal(mine[name], theirs[name]), name


def test_the_template_is_the_pipelines_and_no_image_token_is_in_the_dropped_prefix(
    model: ModelDescription, pipeline: QwenImageEditPipeline
) -> None:
    assert (pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx) == (
        IMAGE_EDIT.template,
        IMAGE_EDIT.prefix_tokens,
    )
    kept = pipeline.tokenizer(IMAGE_EDIT.with_caption("a")).input_ids[IMAGE_EDIT.prefix_tokens :]
    assert pipeline.tokenizer.decode(kept).startswith("<|vision_start|><|image_pad|><|vision_end|>a<|im_end|>")


def test_the_text_depends_on_the_image_and_the_prediction_on_both(model: ModelDescription) -> None:
    encoder = FAMILY.build_text_encoder(model, CPU, torch.float32)
    assert isinstance(encoder, ImageTextEncoder)
    one, other = (encoder.encode_with_images([PROMPT], [some])[0]["embeds"] for some in (SOURCE, 255 - SOURCE))
    assert one.shape == other.shape and not torch.allclose(one, other)
    module = FAMILY.load_denoiser(model, model.experts[0], torch.float32)
    noisy, level = torch.randn(1, 16, 4, 6, generator=torch.Generator().manual_seed(1)), torch.tensor([0.5])
    source = condition(model)["condition"]
    with torch.no_grad():
        said = [
            FAMILY.denoise(model, module, noisy, level, {"embeds": text[None]}, {"condition": some})
            for text, some in ((one, source), (other, source), (one, -source))
        ]
    assert not torch.allclose(said[0], said[1]) and not torch.allclose(said[0], said[2])


def test_encoding_captions_without_images_raises_an_error(model: ModelDescription) -> None:
    with pytest.raises(ModelError, match="encode_with_images"):
        FAMILY.build_text_encoder(model, CPU, torch.float32).encode(["a"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"image": None}, "has no reference image"),
        ({"frames": 5}, "generates single images"),
        ({"image": np.zeros((40, 32, 3), np.uint8)}, "its reference image: it is 32×40"),
        ({"width": 40}, "multiples of 16"),
        ({"inference_steps": 1}, "needs at least 2"),
    ],
)
def test_an_impossible_sample_raises_an_error_with_the_reason(
    model: ModelDescription, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        FAMILY.build_sampler(model, {}, CPU, torch.float32).sample(request(**changed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_samples_can_be_generated_in_16_bits(model: ModelDescription, dtype: torch.dtype) -> None:
    exact = FAMILY.build_sampler(model, {}, CPU, torch.float32).sample(request()).astype(int)
    rough = FAMILY.build_sampler(model, {}, CPU, dtype).sample(request()).astype(int)
    assert abs(rough - exact).mean() < 12
