"""Published models at full size: estimated sizes agree with arithmetic from their model cards, nothing is downloaded.

Tracing steps of full size takes minutes; tests/phantom compares them with torch's allocator. These are the parts that
take seconds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from supertuner.config.sources.load import load_config
from supertuner.core.events import NullSink
from supertuner.core.types import GIB, MIB, MediaKind
from supertuner.data.ordering.buckets import Bucket
from supertuner.models import loading
from supertuner.plan.forecast.dataset_sizes import forecast_schedule
from supertuner.plan.forecast.storage import list_storage
from supertuner.plan.forecast.survey import survey_datasets
from supertuner.plan.forecast.target_machine import known_machine_capacity
from supertuner.plan.forecast.trace_provider import CachedTraceProvider

CONFIGS = Path(__file__).parents[3] / "examples"
SQUARE = Bucket(MediaKind.IMAGE, 1024, 1024, 1, channels=3)


@pytest.fixture(scope="module")
def traces() -> CachedTraceProvider:
    config = load_config(CONFIGS / "wan22_lycoris_pictures.yaml", check_paths=False).config
    return CachedTraceProvider(config, known_machine_capacity("gh200-96"), NullSink(), NullSink())


def test_an_encoded_image_is_half_a_mebibyte_and_a_caption_at_most_four(traces: CachedTraceProvider) -> None:
    sizes = traces.encoded_sizes()
    assert sizes.latent_bytes(SQUARE) == 16 * 128 * 128 * 2
    assert sizes.longest_caption_bytes == 512 * 4096 * 2 and sizes.token_bytes == 4096 * 2
    assert traces.tokens_per_sample(SQUARE) == 64 * 64


def test_a_clip_of_81_frames_in_720p_is_75600_tokens(traces: CachedTraceProvider) -> None:
    clip = Bucket(MediaKind.VIDEO, 1280, 720, 81, channels=3)
    assert traces.tokens_per_sample(clip) == 21 * 45 * 80 == 75_600
    assert traces.encoded_sizes().latent_bytes(clip) == 16 * 21 * 90 * 160 * 2


def test_two_experts_are_57_gigabytes_and_260_latents_136_megabytes(traces: CachedTraceProvider) -> None:
    weights = sum(
        2 * parameter.numel()
        for expert in traces.model.experts
        for parameter in loading.build_meta_module(traces.model, expert.component).parameters()
    )
    assert weights / 1e9 == pytest.approx(57.2, abs=0.2)
    assert 260 * (traces.encoded_sizes().latent_bytes(SQUARE) or 0) / 1e6 == pytest.approx(136.3, abs=0.1)


def test_the_caches_of_the_260_image_example_are_far_below_the_estimates_of_the_forks(
    traces: CachedTraceProvider,
) -> None:
    config = load_config(CONFIGS / "wan22_lycoris_pictures.yaml", check_paths=False).config
    datasets = survey_datasets(config, 260)
    found = {one.what: one for one in list_storage(config, datasets, traces.encoded_sizes(), (), 6 * MIB, None)}
    latents, text = found["cache of latents"].nbytes, found["cache of text"].nbytes
    assert latents is not None and latents < 140 * MIB, "the forks' documents say 8 to 10 GB"
    assert text is not None and text < 1.1 * GIB, (
        "the forks' documents say 2 to 3 GB; this is an upper limit for any captions"
    )
    schedule = forecast_schedule(config, datasets)
    assert schedule is not None and (schedule.total_steps, schedule.total_samples) == (1300, 5200)


@pytest.mark.parametrize(
    ("family", "path", "convolutional"),
    [("sdxl", "stabilityai/stable-diffusion-xl-base-1.0", True), ("flux", "black-forest-labs/FLUX.1-dev", False)],
)
def test_a_denoiser_of_convolutions_is_distinguished_from_one_of_attention(
    family: str, path: str, convolutional: bool
) -> None:
    config = load_config(None, sets=[f"model.family={family}", f"model.path={path}"], environ={}).config
    traces = CachedTraceProvider(config, known_machine_capacity("gh200-96"), NullSink(), NullSink())
    assert traces.is_convolutional(traces.model.experts[0]) is convolutional


@pytest.mark.parametrize(
    ("family", "path", "side", "tokens"),
    [
        ("flux", "black-forest-labs/FLUX.1-dev", 1024, 4096),
        ("qwen-image", "Qwen/Qwen-Image", 1328, 83 * 83),
        ("sd3.5", "stabilityai/stable-diffusion-3.5-large", 1024, 4096),
        ("wan2.2", "Wan-AI/Wan2.2-TI2V-5B-Diffusers", 1024, 32 * 32),
    ],
)
def test_tokens_of_an_image_are_those_of_the_model_cards(family: str, path: str, side: int, tokens: int) -> None:
    config = load_config(None, sets=[f"model.family={family}", f"model.path={path}"], environ={}).config
    traces = CachedTraceProvider(config, known_machine_capacity("gh200-96"), NullSink(), NullSink())
    assert traces.tokens_per_sample(Bucket(MediaKind.IMAGE, side, side, 1, channels=3)) == tokens
