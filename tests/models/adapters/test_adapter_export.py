"""Exported files in diffusers: its pipelines give the trainer's output."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, WanPipeline, WanTransformer3DModel
from safetensors.torch import save_file

from supertuner.config.settings.model import AdapterSettings
from supertuner.models.adapters.attach import (
    TrainableExpert,
    attach,
    export_tensors,
    load_trainable_state,
    resolve_targets,
    save_full_weights,
    temporary_weights,
    trainable_state,
)
from supertuner.models.families.tiny_pipelines import build_pipeline
from supertuner.models.families.wan22.family import tiny_wan_pipeline
from supertuner.models.family_loader import load_family
from supertuner.models.spec import Expert
from tests.models.adapters.modules import flux, flux_output, random_tensor, wan, wan_output

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
CASES = pytest.mark.parametrize("alpha", [None, 3.0, 16.0], ids=["alpha is the rank", "smaller", "larger"])

PRESETS = pytest.mark.parametrize("preset", ["attention", "attention_mlp", "all_linear"])


def with_trained_values(trained: TrainableExpert) -> TrainableExpert:
    """Change every trained tensor from its initial value."""
    load_trainable_state(
        trained,
        {name: tensor + 0.1 * random_tensor(*tensor.shape) for name, tensor in trainable_state(trained).items()},
    )
    return trained


@CASES
@PRESETS
def test_both_experts_load_into_a_wan_pipeline_and_give_the_trainers_output(
    preset: str, alpha: float | None, tmp_path: Path
) -> None:
    settings, wan22 = AdapterSettings(rank=4, alpha=alpha, targets=preset), load_family("wan2.2")
    ours, theirs = build_pipeline(tiny_wan_pipeline, seed=3), build_pipeline(tiny_wan_pipeline, seed=3)
    assert isinstance(theirs, WanPipeline)
    experts = (
        Expert("high_noise", "transformer", sigma_min=0.875),
        Expert("low_noise", "transformer_2", sigma_max=0.875),
    )
    targets = resolve_targets(settings, wan22.target_presets)
    for expert in experts:
        trained = with_trained_values(
            attach(getattr(ours, expert.component), settings, targets, seed=1, name=expert.name)
        )
        tensors, metadata = export_tensors(trained, wan22.export_prefix[expert.component], settings)
        save_file(tensors, tmp_path / f"{expert.name}.safetensors", metadata)
        second = expert.component == "transformer_2"
        theirs.load_lora_weights(tmp_path / f"{expert.name}.safetensors", load_into_transformer_2=second)
    for expert in experts:
        bare = wan_output(getattr(build_pipeline(tiny_wan_pipeline, seed=3), expert.component))
        same(wan_output(getattr(theirs, expert.component)), wan_output(getattr(ours, expert.component)), bare)


@CASES
@PRESETS
def test_an_adapter_loads_into_a_flux_pipeline_and_gives_the_trainers_output(
    preset: str, alpha: float | None, tmp_path: Path
) -> None:
    settings = AdapterSettings(rank=4, alpha=alpha, targets=preset)
    targets = resolve_targets(settings, load_family("flux").target_presets)
    trained = with_trained_values(attach(flux(), settings, targets, seed=1, name="model"))
    tensors, metadata = export_tensors(trained, load_family("flux").export_prefix["transformer"], settings)
    assert "transformer.transformer_blocks.0.attn.to_q.lora_A.weight" in tensors
    save_file(tensors, tmp_path / "adapter.safetensors", metadata)
    pipeline = FluxPipeline(None, None, None, None, None, None, flux())  # type: ignore[arg-type]
    pipeline.load_lora_weights(tmp_path / "adapter.safetensors")
    same(flux_output(pipeline.transformer), flux_output(trained.module), flux_output(flux()))


def same(loaded: torch.Tensor, expected: torch.Tensor, bare: torch.Tensor) -> None:
    assert (expected - bare).abs().max() > 1e-2, "the adapter does something"
    assert (loaded - expected).abs().max() < 1e-6 * max(1.0, expected.abs().max().item())


def test_the_metadata_has_the_settings_of_the_training() -> None:
    settings = AdapterSettings(rank=4, alpha=3.0)
    _, metadata = export_tensors(attach(wan(), settings, ATTENTION, seed=1, name="low_noise"), "transformer", settings)
    assert json.loads(metadata["supertuner"]) == {
        "expert": "low_noise",
        "type": "lora",
        "rank": 4,
        "alpha": 3.0,
        "scale": "in the tensors",
    }


def test_an_adapter_with_alpha_equal_to_its_rank_is_exported_to_the_bit() -> None:
    settings = AdapterSettings(rank=4)
    trained = with_trained_values(attach(wan(), settings, ATTENTION, seed=1, name="model"))
    tensors, _ = export_tensors(trained, "transformer", settings)
    assert all(torch.equal(tensors[f"transformer.{name}"], value) for name, value in trained.parameters.items())


def test_an_average_is_exported_inside_temporary_weights() -> None:
    settings = AdapterSettings(rank=4)
    trained = with_trained_values(attach(wan(), settings, ATTENTION, seed=1, name="model"))
    average = {name: tensor * 0.5 for name, tensor in trainable_state(trained).items()}
    with temporary_weights(trained, average):
        tensors, _ = export_tensors(trained, "transformer", settings)
    assert all(torch.equal(tensors[f"transformer.{name}"], value) for name, value in average.items())


def test_a_fully_trained_expert_is_a_folder_that_diffusers_loads(tmp_path: Path) -> None:
    settings = AdapterSettings(type="full")
    trained = with_trained_values(attach(wan(), settings, (), seed=1, name="model"))
    save_full_weights(trained, tmp_path / "transformer")
    assert {file.name for file in (tmp_path / "transformer").iterdir()} == {
        "config.json",
        "diffusion_pytorch_model.safetensors",
    }
    loaded = WanTransformer3DModel.from_pretrained(tmp_path / "transformer")
    assert all(torch.equal(dict(loaded.named_parameters())[name], value) for name, value in trained.parameters.items())
    assert (wan_output(loaded) - wan_output(trained.module)).abs().max() < 1e-6
    tensors, _ = export_tensors(trained, "transformer", settings)
    assert list(tensors) == list(trained.parameters)


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_the_files_of_a_fully_trained_expert_follow_the_umask(tmp_path: Path, umask: int) -> None:
    trained = attach(wan(), AdapterSettings(type="full"), (), seed=1, name="model")
    before = os.umask(umask)
    try:
        save_full_weights(trained, tmp_path / "transformer")
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "transformer").iterdir()}
    assert len(modes) == 2 and set(modes.values()) == {0o666 & ~umask}, modes


def test_a_fully_trained_expert_can_be_saved_in_bf16_and_stays_in_fp32(tmp_path: Path) -> None:
    trained = with_trained_values(attach(wan(), AdapterSettings(type="full"), (), seed=1, name="model"))
    before = trainable_state(trained)
    save_full_weights(trained, tmp_path / "transformer", torch.bfloat16)
    loaded = WanTransformer3DModel.from_pretrained(tmp_path / "transformer", torch_dtype=torch.bfloat16)
    assert torch.equal(loaded.blocks[0].attn1.to_q.weight, before["blocks.0.attn1.to_q.weight"].bfloat16())
    assert all(torch.equal(before[name], parameter) for name, parameter in trained.parameters.items())
