"""Qwen-Image beyond the contract: captions of different lengths, prompt templates, and errors."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline

from supertuner.core.errors import ModelError
from supertuner.models.families.qwen_image.encoders import TEXT_TO_IMAGE
from supertuner.models.families.qwen_image.family import FAMILY, scheduler_shift
from supertuner.models.families.qwen_image.tiny import tiny_qwen_pipeline
from supertuner.models.families.tiny_pipelines import build_pipeline
from supertuner.models.spec import ModelSource, SampleRequest

CPU = torch.device("cpu")
CAPTIONS = ["a red circle", "", "the color of the background {is} 猫, and the size of the objects"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen") / "pipeline"
    build_pipeline(tiny_qwen_pipeline, seed=0).save_pretrained(path)
    return path


def changed(folder: Path, copy: Path, part: str, file: str, **entries: Any) -> ModelSource:
    """A copy of the pipeline with changed entries in one config."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / part / file).read_text())
    (copy / part / file).write_text(json.dumps(config | entries))
    return ModelSource(str(copy))


def test_captions_of_different_lengths_are_padded_and_masked_as_in_the_pipeline(folder: Path) -> None:
    pipeline = QwenImagePipeline.from_pretrained(folder)
    with torch.no_grad():
        embeds, mask = pipeline.encode_prompt(CAPTIONS, max_sequence_length=512)
    model = FAMILY.read_model(ModelSource(str(folder)))
    ours = FAMILY.pad_text(model, FAMILY.build_text_encoder(model, CPU, torch.float32).encode(CAPTIONS))
    assert torch.equal(ours["mask"], mask) and ours["mask"].dtype == mask.dtype
    torch.testing.assert_close(ours["embeds"], embeds, rtol=1e-4, atol=1e-5)


def test_captions_of_equal_length_have_no_mask(folder: Path) -> None:
    model = FAMILY.read_model(ModelSource(str(folder)))
    texts = FAMILY.build_text_encoder(model, CPU, torch.float32).encode(["a red circle", "a red square"[:12]])
    same = FAMILY.pad_text(model, [texts[0], texts[0]])
    assert set(same) == {"embeds"} and len(same["embeds"]) == 2


def test_padding_does_not_change_the_prediction(folder: Path) -> None:
    model = FAMILY.read_model(ModelSource(str(folder)))
    text = FAMILY.pad_text(model, FAMILY.build_text_encoder(model, CPU, torch.float32).encode(CAPTIONS[:2]))
    module = FAMILY.load_denoiser(model, model.experts[0], torch.float32)
    noisy = torch.randn(2, 16, 4, 6, generator=torch.Generator().manual_seed(1))
    other = {**text, "embeds": text["embeds"] + 9 * (1 - text["mask"])[..., None]}
    levels = torch.tensor([0.3, 0.9])
    with torch.no_grad():
        both = [FAMILY.denoise(model, module, noisy, levels, one, {}) for one in (text, other)]
    assert (other["embeds"] - text["embeds"]).abs().max() > 1
    torch.testing.assert_close(both[0], both[1], rtol=1e-4, atol=1e-5)


def test_the_template_is_the_pipelines_and_has_its_real_length_with_the_tiny_tokenizer() -> None:
    pipeline = build_pipeline(tiny_qwen_pipeline, seed=0)
    assert pipeline.prompt_template_encode == TEXT_TO_IMAGE.template
    assert pipeline.prompt_template_encode_start_idx == TEXT_TO_IMAGE.prefix_tokens
    kept = pipeline.tokenizer(TEXT_TO_IMAGE.with_caption("a")).input_ids[TEXT_TO_IMAGE.prefix_tokens :]
    assert pipeline.tokenizer.decode(kept) == "a<|im_end|>\n<|im_start|>assistant\n"


def test_a_long_caption_is_truncated_as_in_the_pipeline(folder: Path) -> None:
    model, caption = FAMILY.read_model(ModelSource(str(folder))), "a red circle, " * 90
    encoder = FAMILY.build_text_encoder(model, CPU, torch.float32)
    (text,) = encoder.encode([caption])
    with torch.no_grad():
        embeds, _ = QwenImagePipeline.from_pretrained(folder).encode_prompt(caption, max_sequence_length=512)
    assert encoder.truncated_captions == 1 and len(text["embeds"]) == TEXT_TO_IMAGE.max_caption_tokens
    torch.testing.assert_close(text["embeds"], embeds[0], rtol=1e-4, atol=1e-5)


def test_the_shift_is_that_of_the_scheduler_at_a_megapixel(folder: Path, tmp_path: Path) -> None:
    model = FAMILY.read_model(ModelSource(str(folder)))
    assert model.shift == pytest.approx(math.exp(0.5 + 0.4 * (4096 - 256) / (8192 - 256)))
    fixed = {"scheduler": {"use_dynamic_shifting": False, "shift": 3.0}}
    assert scheduler_shift(model.source, fixed) == 3.0


@pytest.mark.parametrize("key", ["guidance_embeds", "use_additional_t_cond", "use_layer3d_rope"])
def test_unsupported_variants_of_the_transformer_raise_an_error(folder: Path, tmp_path: Path, key: str) -> None:
    source = changed(folder, tmp_path / "other", "transformer", "config.json", **{key: True})
    with pytest.raises(ModelError, match=f"{key} is true"):
        FAMILY.read_model(source)


def test_one_inference_step_raises_an_error_if_the_scheduler_needs_two(folder: Path, tmp_path: Path) -> None:
    request = SampleRequest("a", "", 1, 48, 32, 1, inference_steps=1, guidance_scale=1.0)
    model = FAMILY.read_model(ModelSource(str(folder)))
    with pytest.raises(ModelError, match="needs at least 2"):
        FAMILY.build_sampler(model, {}, CPU, torch.float32).sample(request)
    plain = changed(folder, tmp_path / "plain", "scheduler", "scheduler_config.json", shift_terminal=None)
    sample = FAMILY.build_sampler(FAMILY.read_model(plain), {}, CPU, torch.float32).sample(request)
    assert sample.std() > 0


def test_a_sample_of_several_frames_raises_an_error(folder: Path) -> None:
    sampler = FAMILY.build_sampler(FAMILY.read_model(ModelSource(str(folder))), {}, CPU, torch.float32)
    with pytest.raises(ModelError, match="generates single images"):
        sampler.sample(SampleRequest("a", "", 1, 48, 32, 5, inference_steps=2, guidance_scale=1.0))
