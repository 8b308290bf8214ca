"""Flux's guidance input during training is `objective.guidance`, passed as the pipeline passes its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from torch import nn

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import DecisionEvent, Event
from supertuner.models.families.flux.family import FAMILY, tiny_flux_pipeline
from supertuner.models.spec import ModelDescription, ModelSource
from supertuner.step.expert_setup import build_step_options
from supertuner.step.precision import ComputePrecision

CPU = torch.device("cpu")


class CollectedEvents:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """The folder of a tiny Flux, with a guidance input (dev) or without (schnell)."""
    folders: dict[bool, Path] = {}
    for guided in (True, False):
        folders[guided] = tmp_path_factory.mktemp("flux") / "pipeline"
        tiny_flux_pipeline(guided).save_pretrained(folders[guided])
    return folders.__getitem__


def guidance_in_training(model: ModelDescription, **objective: float) -> tuple[torch.Tensor | None, list[Event]]:
    """The guidance input of a training step on two samples, and the events of the settings."""
    config = RunConfig.model_validate({"model": {"family": "flux", "path": "here"}, "objective": objective})
    sink, inputs = CollectedEvents(), []
    options = build_step_options(config, FAMILY, model, ComputePrecision(CPU, "fp32"), sink)
    module = FAMILY.load_denoiser(model, model.experts[0], torch.float32)
    module.register_forward_pre_hook(recorder(inputs), with_kwargs=True)
    text = {"embeds": torch.randn(2, 4, 16), "pooled": torch.randn(2, 16)}
    with torch.no_grad():
        options.denoise(module, torch.randn(2, 16, 4, 6), torch.tensor([0.3, 0.6]), text, {})
    return inputs[0], sink.events


def recorder(inputs: list[torch.Tensor | None]) -> Callable[..., None]:
    def record(_module: nn.Module, _args: Any, arguments: dict[str, Any]) -> None:
        inputs.append(arguments["guidance"])

    return record


def test_the_setting_is_the_input_that_the_pipeline_gets_from_its_guidance_scale(
    folder: Callable[[bool], Path],
) -> None:
    pipeline = FluxPipeline.from_pretrained(folder(True))
    pipeline.set_progress_bar_config(disable=True)
    sampled: list[torch.Tensor | None] = []
    pipeline.transformer.register_forward_pre_hook(recorder(sampled), with_kwargs=True)
    pipeline("a", height=32, width=48, num_inference_steps=1, guidance_scale=3.5, output_type="latent")
    found, events = guidance_in_training(FAMILY.read_model(ModelSource(str(folder(True)))), guidance=3.5)
    assert sampled[0] is not None and found is not None
    assert found.tolist() == [3.5, 3.5] == sampled[0].tolist() * 2
    assert events == []


def test_without_the_setting_flux_dev_learns_at_guidance_1(folder: Callable[[bool], Path]) -> None:
    found, _ = guidance_in_training(FAMILY.read_model(ModelSource(str(folder(True)))))
    assert found is not None and found.tolist() == [1.0, 1.0]


def test_a_model_without_a_guidance_input_ignores_the_setting_and_reports_it(folder: Callable[[bool], Path]) -> None:
    schnell = FAMILY.read_model(ModelSource(str(folder(False))))
    found, (event,) = guidance_in_training(schnell, guidance=3.5)
    assert found is None
    assert isinstance(event, DecisionEvent) and event.what == "objective.guidance"
    assert "3.5 has no effect: guidance is not an input of this model" in event.reason
    assert guidance_in_training(schnell)[1] == []
