"""Wan beyond the contract: images as one-frame videos, first frames, experts, and unsupported variants."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline

from supertuner.core.errors import ModelError
from supertuner.core.types import MediaKind
from supertuner.models.family_loader import load_family
from supertuner.models.spec import ModelSource
from tests.models.families.pipelines import CASES, WrittenPipeline
from tests.models.families.test_family_contract import CPU, media, sample_request

WAN = load_family("wan2.2")


def test_the_boundary_divides_the_sigmas_between_the_experts(
    tiny_wan: ModelSource, tiny_wan_image_to_video: ModelSource
) -> None:
    for source, boundary in ((tiny_wan, 0.875), (tiny_wan_image_to_video, 0.9)):
        high, low = WAN.read_model(source).experts
        assert (high.name, high.component, high.sigma_min, high.sigma_max) == (
            "high_noise",
            "transformer",
            boundary,
            1.0,
        )
        assert (low.name, low.component, low.sigma_min, low.sigma_max) == ("low_noise", "transformer_2", 0.0, boundary)


def test_the_5b_has_one_expert_for_all_sigmas(tiny_wan_5b: ModelSource) -> None:
    model = WAN.read_model(tiny_wan_5b)
    assert [(one.name, one.component, one.sigma_min, one.sigma_max) for one in model.experts] == [
        ("model", "transformer", 0.0, 1.0)
    ]
    assert WAN.token_count(model, (48, 2, 4, 6)) == 2 * 2 * 3


def test_token_count_at_full_size(tiny_wan: ModelSource) -> None:
    """720p, 81 frames: 21×45×80."""
    model = WAN.read_model(tiny_wan)
    assert WAN.unsupported_reason(model, (3, 81, 720, 1280)) is None
    assert WAN.token_count(model, (16, 21, 90, 160)) == 75_600


def test_an_image_is_encoded_as_a_video_of_one_frame(tiny_wan: ModelSource) -> None:
    model = WAN.read_model(tiny_wan)
    encoder = WAN.build_media_encoder(model, CPU)
    pictures = media((3, 32, 48), 2)
    as_pictures, as_videos = encoder.encode(pictures)["latents"], encoder.encode(pictures.unsqueeze(2))["latents"]
    assert as_pictures.shape == (2, 16, 1, 4, 6) and torch.equal(as_pictures, as_videos)
    assert model.media_kinds == {MediaKind.IMAGE, MediaKind.VIDEO}
    assert WAN.unsupported_reason(model, (3, 32, 48)) is None


@pytest.mark.parametrize("frames", [2, 3, 4, 6, 80])
def test_a_number_of_frames_other_than_4n_plus_1_gets_a_reason(tiny_wan: ModelSource, frames: int) -> None:
    reason = WAN.unsupported_reason(WAN.read_model(tiny_wan), (3, frames, 32, 48))
    assert reason == f"it has {frames} frames, and this model takes 1, 5, 9 … (4·n + 1)"


def test_image_to_video_learns_from_videos_only(tiny_wan_image_to_video: ModelSource) -> None:
    model = WAN.read_model(tiny_wan_image_to_video)
    assert model.media_kinds == {MediaKind.VIDEO}
    assert "after the first" in str(WAN.unsupported_reason(model, (3, 32, 48)))
    assert "after the first" in str(WAN.unsupported_reason(model, (3, 1, 32, 48)))


def test_the_condition_equals_that_of_the_pipeline_to_the_bit(tiny_wan_image_to_video: ModelSource) -> None:
    model = WAN.read_model(tiny_wan_image_to_video)
    video = media((3, 9, 32, 48), 2)
    condition = WAN.build_media_encoder(model, CPU).encode(video)["condition"]
    pipeline = WanImageToVideoPipeline.from_pretrained(model.source.path)
    for tensor in (*pipeline.vae.parameters(), *pipeline.vae.buffers()):
        tensor.data = tensor.data.clone()
    for row, one in enumerate(video):
        first = pipeline.video_processor.preprocess(one[:, 0].permute(1, 2, 0).numpy()[None] / np.float32(255))
        with torch.no_grad():
            _, expected = pipeline.prepare_latents(first, 1, 16, 32, 48, 9, torch.float32, CPU)
        assert torch.equal(condition[row], expected[0])


def test_a_sample_of_image_to_video_needs_its_first_frame(
    tiny_wan_image_to_video: ModelSource, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = next(case for case in CASES if case.name == "wan-i2v")
    written = WrittenPipeline(case, WAN, WAN.read_model(tiny_wan_image_to_video))
    sampler = WAN.build_sampler(written.model, {}, CPU, torch.float32)
    with pytest.raises(ModelError, match="no first frame"):
        sampler.sample(sample_request(written, image=None))
    dark = np.zeros((32, 48, 3), np.uint8)
    assert not np.array_equal(
        sampler.sample(sample_request(written)), sampler.sample(sample_request(written, image=dark))
    )


def edited(source: ModelSource, folder: Path, file: str, **changed: object) -> ModelSource:
    shutil.copytree(source.path, folder)
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changed))
    return ModelSource(str(folder))


def test_an_image_encoder_of_wan21_raises_an_error(tiny_wan_image_to_video: ModelSource, tmp_path: Path) -> None:
    old = edited(tiny_wan_image_to_video, tmp_path / "old", "transformer/config.json", image_dim=1280)
    with pytest.raises(ModelError, match="through an image encoder"):
        WAN.read_model(old)


def test_the_5b_as_image_to_video_raises_an_error(tiny_wan_image_to_video: ModelSource, tmp_path: Path) -> None:
    other = edited(tiny_wan_image_to_video, tmp_path / "other", "model_index.json", expand_timesteps=True)
    with pytest.raises(ModelError, match="5B as image-to-video"):
        WAN.read_model(other)


def test_padding_is_zero_and_is_not_stored(tiny_wan: ModelSource) -> None:
    model = WAN.read_model(tiny_wan)
    texts = WAN.build_text_encoder(model, CPU, torch.float32).encode(["", "a red circle", "a " * 600])
    assert [len(text["embeds"]) for text in texts] == [1, 4, 512]
    padded = WAN.pad_text(model, texts)["embeds"]
    assert padded.shape == (3, 512, 16)
    assert not padded[0, 1:].any() and not padded[1, 4:].any() and torch.equal(padded[2], texts[2]["embeds"])


def test_the_tiny_tokenizer_gives_different_captions_different_tokens(tiny_wan: ModelSource) -> None:
    tokenizer = WanPipeline.from_pretrained(tiny_wan.path).tokenizer
    captions = ["a red circle", "a Red circle", "红色的圆", "红色的方", "🔴", "🟦", "zebra", "zebr", "…"]
    tokens = [tuple(tokenizer(caption).input_ids) for caption in captions]
    assert len(set(tokens)) == len(captions)
    assert all(one[-1] == tokenizer.eos_token_id and tokenizer.unk_token_id not in one for one in tokens)
    assert tokenizer.decode(tokens[2], skip_special_tokens=True) == "红色的圆"
