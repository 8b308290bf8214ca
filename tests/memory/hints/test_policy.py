"""What is asked for which tensor: both tables whole, and batches of every shape taken apart by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from supertuner.memory.hints.policy import POLICIES, WORDS, Hint, Kind, kind_named, tensors_in

ONE = torch.zeros(1)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Kind.LATENTS, ["latents", "latent_batch", "noisy_latents", "LATENT"]),
        (Kind.CONDITIONING, ["conditioning_pixel_values", "conditioning_latents", "conditions.image", "add_time_ids"]),
        (Kind.UNCONDITIONAL, ["unconditional_latents", "unconditional_prompt_embeds", "negative_prompt_embeds"]),
        (
            Kind.TEXT,
            ["prompt_embeds", "encoder_hidden_states", "text_embeddings", "text.states", "text_encoder_output"],
        ),
        (Kind.POOLED, ["add_text_embeds", "pooled_prompt_embeds", "text.pooled_projections"]),
        (Kind.MASKS, ["encoder_attention_mask", "conditioning_mask", "text.mask", "loss_mask_data"]),
        (Kind.AUDIO_LATENTS, ["audio_latents", "audio.latents", "audio latents", "audio_latent_batch"]),
        (Kind.SAMPLES, ["pixel_values", "samples", "video", "image"]),
        (Kind.WAVEFORMS, ["waveform", "audio_samples", "audio_features", "wav"]),
        (Kind.NOISE, ["noise", "input_noise"]),
        (Kind.LEVELS, ["levels", "timesteps", "sigmas"]),
        (Kind.OTHER, ["", "0", "luminance", "is_i2v"]),
    ],
)
def test_a_tensors_name_tells_its_kind(kind: Kind, names: list[str]) -> None:
    assert {name: kind_named(name) for name in names} == dict.fromkeys(names, kind)


@pytest.mark.parametrize("kind", Kind)
def test_a_kinds_own_name_is_recognised(kind: Kind) -> None:
    assert kind_named(kind.value) == kind


@pytest.mark.parametrize("policy", ["default", "seeds"])
def test_every_policy_says_something_of_every_kind(policy: str) -> None:
    assert set(POLICIES[policy]) == set(Kind)  # type: ignore[index]


def test_the_default_sends_what_is_about_to_be_read_to_the_gpu_and_pins_nothing_there() -> None:
    assert set(POLICIES["default"].values()) == {(Hint.PREFETCH,)}


def test_the_seeds_keep_latents_and_sound_in_the_host_and_text_and_masks_on_the_gpu() -> None:
    seeds = POLICIES["seeds"]
    for kind in (Kind.LATENTS, Kind.AUDIO_LATENTS, Kind.WAVEFORMS, Kind.SAMPLES):
        assert seeds[kind][0] is Hint.PREFER_CPU
    for kind in (Kind.TEXT, Kind.POOLED, Kind.MASKS, Kind.CONDITIONING, Kind.UNCONDITIONAL):
        assert seeds[kind] == (Hint.PREFER_GPU, Hint.PREFETCH)
    assert seeds[Kind.LATENTS] == (Hint.PREFER_CPU,)


class Pair(NamedTuple):
    latents: torch.Tensor
    prompt_embeds: torch.Tensor


@dataclass
class Batch:
    latents: torch.Tensor
    text: dict[str, torch.Tensor]
    count: int = 3


class PromptEmbeds:
    """As ai-toolkit has it: neither a mapping nor a dataclass, and much else in it."""

    def __init__(self) -> None:
        self.text_embeds = [ONE, ONE]
        self.pooled_embeds = ONE
        self.owner = self


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        (ONE, [""]),
        ([ONE, ONE], ["", ""]),
        (iter([ONE]), [""]),
        ([("latents", ONE), ("text.mask", ONE)], ["latents", "text.mask"]),
        ({"latents": ONE, "audio": {"latents": ONE, "rate": 16000}}, ["latents", "audio.latents"]),
        ({"prompt_embeds": [ONE, (ONE, ONE)], "captions": ["a", "b"]}, ["prompt_embeds"] * 3),
        (Pair(ONE, ONE), ["latents", "prompt_embeds"]),
        (Batch(ONE, {"mask": ONE}), ["latents", "text.mask"]),
        ({"prompt_embeds": PromptEmbeds()}, ["prompt_embeds.text_embeds"] * 2 + ["prompt_embeds.pooled_embeds"]),
        ({"nothing": None, 3: "text"}, []),
    ],
)
def test_a_batch_of_any_shape_is_taken_apart_by_name(batch: object, names: list[str]) -> None:
    assert [name for name, _ in tensors_in(batch)] == names


def test_a_name_inside_another_is_judged_with_what_is_around_it() -> None:
    kinds = [kind_named(name) for name, _ in tensors_in({"audio": {"latents": ONE, "mask": ONE}})]
    assert kinds == [Kind.AUDIO_LATENTS, Kind.MASKS]


def test_the_page_about_hints_shows_these_tables() -> None:
    page = (Path(__file__).parents[3] / "docs" / "hints.md").read_text()
    for kind, words in [*WORDS, (Kind.OTHER, ())]:
        asked = [", ".join(POLICIES[policy][kind]) or "-" for policy in ("default", "seeds")]  # type: ignore[index]
        assert f"| {' | '.join([kind, ', '.join(words), *asked])} |".replace("|  |", "| |") in page
