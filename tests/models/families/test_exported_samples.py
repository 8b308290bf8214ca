"""An exported adapter in the family's own pipeline, loaded by diffusers alone, gives the trainer's own samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from supertuner.config.settings.model import AdapterSettings
from supertuner.models.adapters.attach import Trained, attach, exported, load_state, state, targets_of
from tests.models.families.pipelines import CASES as ALL
from tests.models.families.pipelines import Written
from tests.models.families.test_family_contract import CPU, wanted
from tests.models.families.test_like_the_pipeline import PROMPT, loaded, run

__all__ = ["loaded"]

CASES = [case for case in ALL if case.name in ("flux-dev", "qwen-image", "sd3.5", "sdxl", "sdxl-v", "wan-t2v")]
SETTINGS = {
    targets: AdapterSettings(rank=4, alpha=2.0, targets=targets)
    for targets in ("all_linear", "all_layers")  # convolutions too, where a family has them
}


def learnt(trained: Trained) -> Trained:
    """As if trained: every tensor has left its first value."""
    drawn = torch.Generator().manual_seed(5)
    values = {name: one + 0.1 * torch.randn(one.shape, generator=drawn) for name, one in state(trained).items()}
    load_state(trained, values)
    return trained


class Decoded:
    """What a pipeline's VAE decodes, before it is rounded."""

    def __init__(self, vae: nn.Module) -> None:
        self._outputs: list[torch.Tensor] = []
        decoder = vae.get_submodule("decoder")
        decoder.register_forward_hook(lambda _module, _inputs, output: self._outputs.append(output.clone()))

    def taken(self) -> torch.Tensor:
        """All of it since the last time."""
        together = torch.cat([output.flatten() for output in self._outputs])
        self._outputs.clear()
        return together


@pytest.mark.parametrize("written", CASES, ids=lambda case: case.name, indirect=True)
def test_an_exported_adapter_gives_the_trainers_samples(written: Written, loaded: Any, tmp_path: Path) -> None:
    family, model, request = written.family, written.model, wanted(written, prompt=PROMPT)
    assert request.image is not None
    options = {"guidance_scale": request.guidance_scale, "output_type": "np"}
    decoded = Decoded(loaded.vae)
    run(loaded, written, request.inference_steps, request.image, **options)
    bare = decoded.taken()
    settings = SETTINGS["all_layers" if "all_layers" in family.targets else "all_linear"]
    parts = {}
    for expert in model.experts:
        module = family.denoiser(model, expert, torch.float32)
        trained = learnt(attach(module, settings, targets_of(settings, family.targets), seed=1, name=expert.name))
        parts[expert.part] = trained.module
        tensors, metadata = exported(trained, family.export_prefix[expert.part], settings)
        save_file(tensors, tmp_path / f"{expert.name}.safetensors", metadata)
        second = {"load_into_transformer_2": True} if expert.part == "transformer_2" else {}
        loaded.load_lora_weights(tmp_path / f"{expert.name}.safetensors", adapter_name=expert.name, **second)
    run(loaded, written, request.inference_steps, request.image, **options)
    sampler: Any = family.sampler(model, parts, CPU, torch.float32)
    own = Decoded(sampler._pipeline.vae)
    sampler.sample(request)
    ours, theirs = own.taken(), decoded.taken()
    assert (ours - bare).abs().max() > 1e-2, "the adapter does something"
    assert (ours - theirs).abs().max() < 1e-5
