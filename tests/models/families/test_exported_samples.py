"""An exported adapter, loaded by diffusers into the family's pipeline, gives the trainer's samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
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
from tests.models.families.pipelines import CASES as ALL
from tests.models.families.pipelines import WrittenPipeline
from tests.models.families.test_family_contract import CPU, sample_request
from tests.models.families.test_like_the_pipeline import PROMPT, loaded, run

__all__ = ["loaded"]

CASES = [case for case in ALL if case.name in ("flux-dev", "qwen-image", "sd3.5", "sdxl", "sdxl-v", "wan-t2v")]
SETTINGS = {
    targets: AdapterSettings(rank=4, alpha=2.0, targets=targets)
    for targets in ("all_linear", "all_layers")  # with convolutions, if the family has them
}


def with_trained_values(trained: TrainableExpert) -> TrainableExpert:
    """Change every trained tensor from its initial value."""
    drawn = torch.Generator().manual_seed(5)
    values = {
        name: one + 0.1 * torch.randn(one.shape, generator=drawn) for name, one in trainable_state(trained).items()
    }
    load_trainable_state(trained, values)
    return trained


class DecodedOutputs:
    """Records what a pipeline's VAE decodes, before rounding."""

    def __init__(self, vae: nn.Module) -> None:
        self._outputs: list[torch.Tensor] = []
        decoder = vae.get_submodule("decoder")
        decoder.register_forward_hook(lambda _module, _inputs, output: self._outputs.append(output.clone()))

    def take(self) -> torch.Tensor:
        """Everything since the last call."""
        together = torch.cat([output.flatten() for output in self._outputs])
        self._outputs.clear()
        return together


@pytest.mark.parametrize("written", CASES, ids=lambda case: case.name, indirect=True)
def test_an_exported_adapter_gives_the_trainers_samples(written: WrittenPipeline, loaded: Any, tmp_path: Path) -> None:
    family, model, request = written.family, written.model, sample_request(written, prompt=PROMPT)
    assert request.image is not None
    options = {"guidance_scale": request.guidance_scale, "output_type": "np"}
    decoded = DecodedOutputs(loaded.vae)
    run(loaded, written, request.inference_steps, request.image, **options)
    bare = decoded.take()
    settings = SETTINGS["all_layers" if "all_layers" in family.target_presets else "all_linear"]
    parts = {}
    for expert in model.experts:
        module = family.load_denoiser(model, expert, torch.float32)
        trained = with_trained_values(
            attach(module, settings, resolve_targets(settings, family.target_presets), seed=1, name=expert.name)
        )
        parts[expert.component] = trained.module
        tensors, metadata = export_tensors(trained, family.export_prefix[expert.component], settings)
        save_file(tensors, tmp_path / f"{expert.name}.safetensors", metadata)
        second = {"load_into_transformer_2": True} if expert.component == "transformer_2" else {}
        loaded.load_lora_weights(tmp_path / f"{expert.name}.safetensors", adapter_name=expert.name, **second)
    run(loaded, written, request.inference_steps, request.image, **options)
    sampler: Any = family.build_sampler(model, parts, CPU, torch.float32)
    own = DecodedOutputs(sampler.pipeline.vae)
    sampler.sample(request)
    ours, theirs = own.take(), decoded.take()
    assert (ours - bare).abs().max() > 1e-2, "the adapter does something"
    assert (ours - theirs).abs().max() < 1e-5
