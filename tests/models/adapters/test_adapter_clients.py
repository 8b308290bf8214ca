"""Our files in other programs: diffusers computes the same output, and lycoris-lora merges to the same weights.

The clients are the real ones, and know nothing of us.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, WanPipeline
from lycoris import create_lycoris_from_weights
from safetensors.torch import save_file
from torch import nn

from supertuner.config.settings.model import AdapterSettings
from supertuner.models.adapters.attach import (
    TrainableExpert,
    attach,
    export_tensors,
    load_trainable_state,
    resolve_targets,
    trainable_state,
)
from supertuner.models.families.tiny_pipelines import build_pipeline
from supertuner.models.families.wan22.family import tiny_wan_pipeline
from supertuner.models.family_loader import load_family
from tests.models.adapters.modules import flux, flux_output, random_tensor, wan, wan_output

SEVERAL = ({"match": "attn1.to_q", "rank": 8, "alpha": 2.0}, {"match": "*.1.*", "rank": 3})
LORAS = {
    "dora": {"rank": 4, "alpha": 3.0, "dora": True},
    "rslora": {"rank": 4, "alpha": 3.0, "rslora": True},
    "several ranks": {"rank": 4, "alpha": 3.0, "modules": SEVERAL},
    "all of it": {"rank": 4, "modules": SEVERAL, "dora": True, "rslora": True},
}
LYCORIS = {
    "locon": {"type": "locon", "rank": 4, "alpha": 3.0},
    "loha": {"type": "loha", "rank": 4, "alpha": 3.0},
    "lokr": {"type": "lokr", "rank": 1, "alpha": 3.0},
    "lokr, factor": {"type": "lokr", "rank": 2, "alpha": 3.0, "lokr_factor": 4},
    "lokr, whole": {"type": "lokr", "rank": 4, "alpha": 3.0, "lokr_full_matrix": True},
    "lokr, whole, rslora": {"type": "lokr", "rank": 4, "alpha": 3.0, "lokr_full_matrix": True, "rslora": True},
    "rslora": {"type": "loha", "rank": 4, "alpha": 3.0, "rslora": True},
    "several ranks": {"type": "lokr", "rank": 2, "modules": SEVERAL},
    "diff": {"type": "diff"},
}
PRESETS = pytest.mark.parametrize("preset", ["attention", "all_linear"])
Forward = Callable[[nn.Module], torch.Tensor]


def with_trained_values(trained: TrainableExpert) -> TrainableExpert:
    """Change every trained tensor from its initial value."""
    load_trainable_state(
        trained,
        {name: tensor + 0.1 * random_tensor(*tensor.shape) for name, tensor in trainable_state(trained).items()},
    )
    return trained


def adapter_settings(facts: dict[str, object], preset: str) -> AdapterSettings:
    return AdapterSettings.model_validate({**facts, "targets": preset})


def same(loaded: torch.Tensor, expected: torch.Tensor, bare: torch.Tensor, within: float = 1e-5) -> None:
    assert (expected - bare).abs().max() > 1e-2, "the adapter does something"
    assert (loaded - expected).abs().max() < within * max(1.0, expected.abs().max().item())


@PRESETS
@pytest.mark.parametrize("facts", LORAS.values(), ids=LORAS)
def test_both_experts_load_into_a_wan_pipeline_and_give_the_trainers_output(
    facts: dict[str, object], preset: str, tmp_path: Path
) -> None:
    settings, wan22 = adapter_settings(facts, preset), load_family("wan2.2")
    ours, theirs = build_pipeline(tiny_wan_pipeline, seed=3), build_pipeline(tiny_wan_pipeline, seed=3)
    assert isinstance(theirs, WanPipeline)
    parts = {"transformer": "high_noise", "transformer_2": "low_noise"}
    for part, name in parts.items():
        targets = resolve_targets(settings, wan22.target_presets)
        trained = with_trained_values(attach(getattr(ours, part), settings, targets, seed=1, name=name))
        save_file(*_file(trained, wan22.export_prefix[part], settings, tmp_path / f"{name}.safetensors"))
        theirs.load_lora_weights(tmp_path / f"{name}.safetensors", load_into_transformer_2=part == "transformer_2")
    for part in parts:
        bare = wan_output(getattr(build_pipeline(tiny_wan_pipeline, seed=3), part))
        same(wan_output(getattr(theirs, part)), wan_output(getattr(ours, part)), bare)


def test_files_of_swapped_experts_do_not_give_the_trainers_output(tmp_path: Path) -> None:
    """diffusers loads each file into the other expert without an error, so only outputs reveal a swap."""
    settings, wan22 = adapter_settings({"rank": 4}, "attention"), load_family("wan2.2")
    ours, theirs = build_pipeline(tiny_wan_pipeline, seed=3), build_pipeline(tiny_wan_pipeline, seed=3)
    assert isinstance(theirs, WanPipeline)
    parts = {"transformer": "high_noise", "transformer_2": "low_noise"}
    for part, name in parts.items():
        trained = with_trained_values(attach(getattr(ours, part), settings, ("to_q", "to_v"), seed=1, name=name))
        save_file(*_file(trained, wan22.export_prefix[part], settings, tmp_path / f"{name}.safetensors"))
    for other, name in (("transformer_2", "high_noise"), ("transformer", "low_noise")):
        theirs.load_lora_weights(tmp_path / f"{name}.safetensors", load_into_transformer_2=other == "transformer_2")
    for part in parts:
        expected, loaded = wan_output(getattr(ours, part)), wan_output(getattr(theirs, part))
        assert (loaded - expected).abs().max() > 1e-3


@PRESETS
@pytest.mark.parametrize("facts", LORAS.values(), ids=LORAS)
def test_an_adapter_loads_into_a_flux_pipeline_and_gives_the_trainers_output(
    facts: dict[str, object], preset: str, tmp_path: Path
) -> None:
    if "modules" in facts:
        facts = {**facts, "modules": ({"match": "transformer_blocks.0.attn.to_q", "rank": 8, "alpha": 2.0},)}
    settings = adapter_settings(facts, preset)
    trained = with_trained_values(
        attach(flux(), settings, resolve_targets(settings, load_family("flux").target_presets), seed=1, name="model")
    )
    save_file(*_file(trained, "transformer", settings, tmp_path / "adapter.safetensors"))
    pipeline = FluxPipeline(None, None, None, None, None, None, flux())  # type: ignore[arg-type]
    pipeline.load_lora_weights(tmp_path / "adapter.safetensors")
    same(flux_output(pipeline.transformer), flux_output(trained.module), flux_output(flux()))


@pytest.mark.parametrize(
    "name, make, forward", [("wan2.2", wan, wan_output), ("flux", flux, flux_output)], ids=["wan", "flux"]
)
@PRESETS
@pytest.mark.parametrize("facts", LYCORIS.values(), ids=LYCORIS)
@pytest.mark.usefixtures("silence_lycoris")
def test_lycoris_loads_and_merges_to_the_trained_weights(
    facts: dict[str, object], preset: str, name: str, make: Callable[[], nn.Module], forward: Forward, tmp_path: Path
) -> None:
    if "modules" in facts and name == "flux":
        facts = {**facts, "modules": ({"match": "attn.to_q", "rank": 1, "alpha": 2.0},)}
    settings = adapter_settings(facts, preset)
    trained = with_trained_values(
        attach(make(), settings, resolve_targets(settings, load_family(name).target_presets), seed=1, name="model")
    )
    save_file(*_file(trained, "unused", settings, tmp_path / "adapter.safetensors"))
    theirs = make()
    network, _ = create_lycoris_from_weights(1.0, str(tmp_path / "adapter.safetensors"), theirs)
    assert len(network.loras) == len(trained.layers)
    network.merge_to()
    same(forward(theirs), forward(trained.module), forward(make()))
    for key in trained.layers:
        layer = trained.module.get_submodule(key)
        if isinstance(layer, nn.Linear):
            computed = layer(torch.eye(layer.in_features)) - layer(torch.zeros(layer.in_features))
            assert (computed.T - theirs.get_submodule(key).weight).abs().max() < 1e-5


@pytest.fixture
def silence_lycoris() -> Iterator[None]:
    logger = logging.getLogger("LyCORIS")
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(logging.INFO)


def test_files_have_the_names_of_lycoris() -> None:
    settings = AdapterSettings(type="lokr", rank=1)
    tensors, metadata = export_tensors(attach(wan(), settings, ("to_q",), seed=1, name="model"), "unused", settings)
    first = "lycoris_blocks_0_attn1_to_q"
    assert [name for name in tensors if name.startswith(f"{first}.")] == [
        f"{first}.{tensor}" for tensor in ("alpha", "lokr_w1", "lokr_w2_a", "lokr_w2_b")
    ]
    assert '"type": "lokr"' in metadata["supertuner"]


def _file(
    trained: TrainableExpert, prefix: str, settings: AdapterSettings, path: Path
) -> tuple[object, Path, dict[str, str]]:
    tensors, metadata = export_tensors(trained, prefix, settings)
    return tensors, path, metadata
