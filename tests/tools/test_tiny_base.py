"""The tiny base model that ships with the package."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from supertuner.models.families.wan22.family import FAMILY
from supertuner.models.spec import ModelDescription, ModelSource, SampleRequest
from supertuner.tools import shapes
from tests.tools.shape_classifier import classify

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base() -> ModelDescription:
    return FAMILY.read_model(ModelSource(str(shapes.BASE_MODEL), offline=True))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_base_is_small_and_contains_only_safetensors_and_text() -> None:
    files = [path for path in shapes.BASE_MODEL.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json", ".md"}
    assert sum(path.stat().st_size for path in files) < 5_000_000
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as stored:  # type: ignore[no-untyped-call]
                assert all(torch.isfinite(stored.get_tensor(name)).all() for name in stored.offset_keys())


def test_the_base_is_a_text_to_video_model_with_two_experts(base: ModelDescription) -> None:
    assert [(one.name, one.sigma_min, one.sigma_max) for one in base.experts] == [
        ("high_noise", 0.875, 1.0),
        ("low_noise", 0.0, 0.875),
    ]
    assert base.shift == 3.0
    assert FAMILY.unsupported_reason(base, (3, shapes.SIDE_PIXELS, shapes.SIDE_PIXELS)) is None


def test_every_word_of_the_captions_is_one_token_with_a_distinct_embedding(
    base: ModelDescription,
) -> None:
    words = [*shapes.COLOURS, *shapes.SHAPES]
    encoded = FAMILY.build_text_encoder(base, CPU, torch.float32).encode([f"a {word}" for word in words])
    assert {tuple(one["embeds"].shape) for one in encoded} == {(3, 64)}
    directions = torch.nn.functional.normalize(torch.stack([one["embeds"][1] for one in encoded]), dim=1)
    alike = directions @ directions.T - torch.eye(len(words))
    assert alike.abs().max() < 0.6


def test_pictures_of_both_styles_are_recognised_after_the_vae(base: ModelDescription) -> None:
    drawn = [
        *shapes.random_drawings((*shapes.train_pairs(), *shapes.HELD_OUT_PAIRS), 3, Random(1)),
        *shapes.random_drawings(shapes.chalk_pairs(), 2, Random(2)),
    ]
    pictures = torch.from_numpy(shapes.render_drawings(drawn)).permute(0, 3, 1, 2)
    latents = FAMILY.build_media_encoder(base, CPU).encode(pictures)["latents"]
    assert latents.shape == (len(drawn), 8, 1, 6, 6)
    assert 0.8 < latents.std() < 1.2
    back = _decoded(base, latents)
    right = [classify(picture).pair == (one.colour, one.shape) for one, picture in zip(drawn, back, strict=True)]
    assert np.mean(right) > 0.97


def test_the_base_draws_the_prompted_shapes_in_chalk(base: ModelDescription) -> None:
    sampler = FAMILY.build_sampler(base, {}, CPU, torch.float32)
    pairs = shapes.chalk_pairs()
    seen = [classify(_sample(sampler, shapes.caption(*pair), seed)) for seed, pair in enumerate(pairs)]
    assert np.mean([one.pair == pair for one, pair in zip(seen, pairs, strict=True)]) >= 0.6


def test_the_base_cannot_draw_the_inks(base: ModelDescription) -> None:
    sampler = FAMILY.build_sampler(base, {}, CPU, torch.float32)
    pairs = shapes.HELD_OUT_PAIRS
    seen = [classify(_sample(sampler, shapes.caption(*pair), seed)) for seed, pair in enumerate(pairs)]
    assert sum(one.pair == pair for one, pair in zip(seen, pairs, strict=True)) <= 1


def _sample(sampler: Any, prompt: str, seed: int) -> NDArray[np.uint8]:
    side = shapes.SIDE_PIXELS
    request = SampleRequest(prompt, "", seed, side, side, frames=1, inference_steps=16, guidance_scale=2.0)
    picture: NDArray[np.uint8] = sampler.sample(request)[0]
    return picture


@torch.no_grad()
def _decoded(base: ModelDescription, latents: torch.Tensor) -> NDArray[np.uint8]:
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan.from_pretrained(Path(base.source.path) / "vae")
    mean, std = (torch.tensor(vae.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    pixels = vae.decode(latents * std + mean).sample[:, :, 0].permute(0, 2, 3, 1)
    return ((pixels + 1) * 127.5).round().byte().numpy()
