"""Each adapter type on each family: all of it is trained, nothing else is, and other programs load it.

Wan and Flux are gone through layer by layer in tests/models_parts; here are the families with other layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lycoris import create_lycoris_from_weights
from safetensors.torch import save_file
from torch import nn

from supertuner.config.settings.model import AdapterSettings
from supertuner.models.adapters.attach import TrainableExpert, attach, export_tensors, resolve_targets, trainable_state
from tests.models.adapters.test_adapter_kinds import KINDS
from tests.models.families.pipelines import CASES as ALL
from tests.models.families.pipelines import WrittenPipeline
from tests.models.families.test_exported_samples import with_trained_values
from tests.models.families.test_family_contract import encoded
from tests.models.families.test_like_the_pipeline import loaded

__all__ = ["loaded"]

FAMILIES = pytest.mark.parametrize(
    "written",
    [case for case in ALL if case.name in ("qwen-image", "sd3.5", "sdxl")],
    ids=lambda case: case.name,
    indirect=True,
)
BY_PEFT = {name: settings for name, settings in KINDS.items() if settings.type == "lora"}
BY_LYCORIS = {name: settings for name, settings in KINDS.items() if settings.type != "lora"}


def module_of(written: WrittenPipeline) -> nn.Module:
    return written.family.load_denoiser(written.model, written.model.experts[0], torch.float32)


def forward_of(written: WrittenPipeline) -> Callable[[nn.Module], torch.Tensor]:
    latents, conditions, text = encoded(written)
    levels = torch.tensor([0.3, 0.8])
    return lambda module: written.family.denoise(written.model, module, latents, levels, text, conditions)


def attached(written: WrittenPipeline, settings: AdapterSettings, module: nn.Module) -> TrainableExpert:
    """On the layers of the family's largest preset."""
    preset = "all_layers" if "all_layers" in written.family.target_presets else "all_linear"
    targets = resolve_targets(settings.model_copy(update={"targets": preset}), written.family.target_presets)
    return attach(module, settings, targets, seed=1, name="model")


def unreached(written: WrittenPipeline, name: str) -> bool:
    """Whether the layer gets no gradient by design (see `FamilyCase`)."""
    return bool(written.case.without_gradient) and name.startswith(written.case.without_gradient)


@FAMILIES
@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_all_of_the_adapter_is_trained_and_nothing_else(written: WrittenPipeline, settings: AdapterSettings) -> None:
    module, forward = module_of(written), forward_of(written)
    trained = attached(written, settings, module)
    first = trainable_state(trained)
    learning = {id(parameter) for parameter in trained.parameters.values()}
    frozen = {name: one.clone() for name, one in module.named_parameters() if id(one) not in learning}
    optimizer = torch.optim.Adam(trained.parameters.values(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        forward(module).square().mean().backward()
        optimizer.step()
    still = [name for name, one in trained.parameters.items() if torch.equal(first[name], one)]
    assert [name for name in still if not unreached(written, name)] == []
    now = dict(module.named_parameters())
    assert all(torch.equal(value, now[name]) and now[name].grad is None for name, value in frozen.items())


@FAMILIES
@pytest.mark.parametrize("settings", BY_PEFT.values(), ids=BY_PEFT)
def test_an_adapter_of_peft_loads_into_the_pipeline(
    written: WrittenPipeline, loaded: Any, settings: AdapterSettings, tmp_path: Path
) -> None:
    part = written.model.experts[0].component
    forward = forward_of(written)
    trained = with_trained_values(attached(written, settings, module_of(written)))
    tensors, metadata = export_tensors(trained, written.family.export_prefix[part], settings)
    save_file(tensors, tmp_path / "adapter.safetensors", metadata)
    loaded.load_lora_weights(tmp_path / "adapter.safetensors")
    with torch.no_grad():
        same(forward(getattr(loaded, part)), forward(trained.module), forward(module_of(written)))


@FAMILIES
@pytest.mark.parametrize("settings", BY_LYCORIS.values(), ids=BY_LYCORIS)
@pytest.mark.usefixtures("silence_lycoris")
def test_an_adapter_of_lycoris_loads_and_merges_to_the_same_output(
    written: WrittenPipeline, settings: AdapterSettings, tmp_path: Path
) -> None:
    forward = forward_of(written)
    trained = with_trained_values(attached(written, settings, module_of(written)))
    tensors, metadata = export_tensors(trained, "unused", settings)
    save_file(tensors, tmp_path / "adapter.safetensors", metadata)
    theirs = module_of(written)
    network, _ = create_lycoris_from_weights(1.0, str(tmp_path / "adapter.safetensors"), theirs)
    assert len(network.loras) == len(trained.layers)
    network.merge_to()
    with torch.no_grad():
        same(forward(theirs), forward(trained.module), forward(module_of(written)))


def same(loaded: torch.Tensor, expected: torch.Tensor, bare: torch.Tensor) -> None:
    assert (expected - bare).abs().max() > 1e-2, "the adapter does something"
    assert (loaded - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max().item())


@pytest.fixture
def silence_lycoris() -> Iterator[None]:
    logger = logging.getLogger("LyCORIS")
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(logging.INFO)
