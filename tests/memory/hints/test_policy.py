"""Which hints a tensor receives: both complete tables, and naming the tensors of batches of every structure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from supertuner.memory.hints.policy import KIND_WORDS, POLICIES, BatchHint, BatchTensorKind, named_tensors, tensor_kind

ONE = torch.zeros(1)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (BatchTensorKind.LATENTS, ["latents", "latent_batch", "noisy_latents", "LATENT"]),
        (
            BatchTensorKind.CONDITIONING,
            ["conditioning_pixel_values", "conditioning_latents", "conditions.image", "add_time_ids"],
        ),
        (
            BatchTensorKind.UNCONDITIONAL,
            ["unconditional_latents", "unconditional_prompt_embeds", "negative_prompt_embeds"],
        ),
        (
            BatchTensorKind.TEXT,
            ["prompt_embeds", "encoder_hidden_states", "text_embeddings", "text.states", "text_encoder_output"],
        ),
        (BatchTensorKind.POOLED, ["add_text_embeds", "pooled_prompt_embeds", "text.pooled_projections"]),
        (BatchTensorKind.MASKS, ["encoder_attention_mask", "conditioning_mask", "text.mask", "loss_mask_data"]),
        (BatchTensorKind.AUDIO_LATENTS, ["audio_latents", "audio.latents", "audio latents", "audio_latent_batch"]),
        (BatchTensorKind.SAMPLES, ["pixel_values", "samples", "video", "image"]),
        (BatchTensorKind.WAVEFORMS, ["waveform", "audio_samples", "audio_features", "wav"]),
        (BatchTensorKind.NOISE, ["noise", "input_noise"]),
        (BatchTensorKind.SIGMAS, ["levels", "timesteps", "sigmas"]),
        (BatchTensorKind.OTHER, ["", "0", "luminance", "is_i2v"]),
    ],
)
def test_the_kind_of_a_tensor_follows_from_its_name(kind: BatchTensorKind, names: list[str]) -> None:
    assert {name: tensor_kind(name) for name in names} == dict.fromkeys(names, kind)


@pytest.mark.parametrize("kind", BatchTensorKind)
def test_the_name_of_a_kind_is_recognised(kind: BatchTensorKind) -> None:
    assert tensor_kind(kind.value) == kind


@pytest.mark.parametrize("policy", ["default", "forks"])
def test_every_policy_has_an_entry_for_every_kind(policy: str) -> None:
    assert set(POLICIES[policy]) == set(BatchTensorKind)  # type: ignore[index]


def test_the_default_policy_only_prefetches() -> None:
    assert set(POLICIES["default"].values()) == {(BatchHint.PREFETCH,)}


def test_the_forks_policy_keeps_latents_and_audio_at_the_host_and_text_and_masks_on_the_gpu() -> None:
    forks = POLICIES["forks"]
    for kind in (
        BatchTensorKind.LATENTS,
        BatchTensorKind.AUDIO_LATENTS,
        BatchTensorKind.WAVEFORMS,
        BatchTensorKind.SAMPLES,
    ):
        assert forks[kind][0] is BatchHint.PREFER_CPU
    for kind in (
        BatchTensorKind.TEXT,
        BatchTensorKind.POOLED,
        BatchTensorKind.MASKS,
        BatchTensorKind.CONDITIONING,
        BatchTensorKind.UNCONDITIONAL,
    ):
        assert forks[kind] == (BatchHint.PREFER_GPU, BatchHint.PREFETCH)
    assert forks[BatchTensorKind.LATENTS] == (BatchHint.PREFER_CPU,)


class NamedBatch(NamedTuple):
    latents: torch.Tensor
    prompt_embeds: torch.Tensor


@dataclass
class DataclassBatch:
    latents: torch.Tensor
    text: dict[str, torch.Tensor]
    count: int = 3


class PromptEmbeds:
    """Like ai-toolkit's class: neither a mapping nor a dataclass, with further attributes."""

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
        (NamedBatch(ONE, ONE), ["latents", "prompt_embeds"]),
        (DataclassBatch(ONE, {"mask": ONE}), ["latents", "text.mask"]),
        ({"prompt_embeds": PromptEmbeds()}, ["prompt_embeds.text_embeds"] * 2 + ["prompt_embeds.pooled_embeds"]),
        ({"nothing": None, 3: "text"}, []),
    ],
)
def test_the_tensors_of_any_batch_structure_are_named(batch: object, names: list[str]) -> None:
    assert [name for name, _ in named_tensors(batch)] == names


def test_a_nested_name_is_classified_together_with_its_containers() -> None:
    kinds = [tensor_kind(name) for name, _ in named_tensors({"audio": {"latents": ONE, "mask": ONE}})]
    assert kinds == [BatchTensorKind.AUDIO_LATENTS, BatchTensorKind.MASKS]


def test_the_documentation_shows_these_tables() -> None:
    page = (Path(__file__).parents[3] / "docs" / "hints.md").read_text()
    for kind, words in [*KIND_WORDS, (BatchTensorKind.OTHER, ())]:
        hints = [", ".join(POLICIES[policy][kind]) or "-" for policy in ("default", "forks")]  # type: ignore[index]
        assert f"| {' | '.join([kind, ', '.join(words), *hints])} |".replace("|  |", "| |") in page
