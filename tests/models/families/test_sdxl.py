"""SDXL beyond the contract: its table of timesteps, prediction types, micro-conditioning, and empty captions."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, StableDiffusionXLPipeline

from supertuner.config.settings.model import ObjectiveSettings
from supertuner.core.errors import ModelError
from supertuner.models.attention import require_backend_support
from supertuner.models.families.sdxl.family import tiny_sdxl_pipeline
from supertuner.models.families.tiny_pipelines import write_pipeline
from supertuner.models.family_loader import load_family
from supertuner.models.objective.diffusion import add_noise, prediction_target
from supertuner.models.objective.from_settings import build_objective, timestep_distribution
from supertuner.models.spec import ModelDescription, ModelSource
from tests.models.families.test_family_contract import CPU
from tests.models.families.test_like_the_pipeline import CapturedCalls

SDXL = load_family("sdxl")


@pytest.fixture(scope="module", params=["epsilon", "v"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelDescription:
    folder = tmp_path_factory.mktemp("sdxl") / request.param
    write_pipeline(partial(tiny_sdxl_pipeline, request.param), folder, 0)
    return SDXL.read_model(ModelSource(str(folder)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pipeline(tiny_sdxl_pipeline, tmp_path / "sdxl", 0)
    return tmp_path / "sdxl"


def rewritten(file: Path, **changed: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def pipeline_of(model: ModelDescription) -> Any:
    pipeline = StableDiffusionXLPipeline.from_pretrained(model.source.path)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_noise_and_targets_equal_those_of_diffusers_training(model: ModelDescription) -> None:
    theirs = DDPMScheduler.from_config(pipeline_of(model).scheduler.config)
    objective = build_objective(ObjectiveSettings(), SDXL, model)
    clean, noise = torch.randn(2, 4, 4, 4, 6, generator=torch.Generator().manual_seed(0)).unbind()
    steps = torch.tensor([0, 1, 500, 998])
    levels = (steps + 0.5) / 1000
    ours = add_noise(clean, noise, levels, objective), prediction_target(clean, noise, levels, objective)
    velocity = theirs.get_velocity(clean, noise, steps)
    torch.testing.assert_close(ours[0], theirs.add_noise(clean, noise, steps))
    torch.testing.assert_close(ours[1], velocity if model.prediction == "v" else noise)


def test_the_model_receives_the_timestep_of_its_noise(model: ModelDescription) -> None:
    module = SDXL.load_denoiser(model, model.experts[0], torch.float32)
    seen: list[torch.Tensor] = []
    module.register_forward_pre_hook(lambda _module, args: seen.append(args[1]))
    text = SDXL.pad_text(model, SDXL.build_text_encoder(model, CPU, torch.float32).encode(["a", "b", "c"]))
    levels = torch.tensor([2.0**-20, 0.5, 1.0])
    SDXL.denoise(model, module, torch.zeros(3, 4, 4, 4), levels, text, {})
    assert seen[0].tolist() == [0, 500, 999]


def test_sigmas_are_uniform_unless_the_settings_say_otherwise(model: ModelDescription) -> None:
    configured = ObjectiveSettings(timesteps="logit_normal")
    assert timestep_distribution(ObjectiveSettings(), SDXL, model, (4, 8, 8)).kind == "uniform"
    assert timestep_distribution(configured, SDXL, model, (4, 8, 8)).kind == "logit_normal"


def test_framing_is_passed_as_in_the_pipeline(model: ModelDescription) -> None:
    pipeline = pipeline_of(model)
    captured = CapturedCalls(pipeline, ["unet"])
    pipeline(
        "a red circle",
        height=32,
        width=48,
        num_inference_steps=1,
        guidance_scale=1.0,
        original_size=(100, 300),
        crops_coords_top_left=(7, 9),
        target_size=(32, 48),
        output_type="latent",
    )
    _, inputs, expected = captured.calls[0]
    text = SDXL.pad_text(model, SDXL.build_text_encoder(model, CPU, torch.float32).encode(["a red circle"]))
    framing = torch.tensor([[100.0, 300.0, 7.0, 9.0, 32.0, 48.0]])
    level = (inputs["timestep"].reshape(1) + 0.5) / 1000
    module = SDXL.load_denoiser(model, model.experts[0], torch.float32)

    def denoised(conditions: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return SDXL.denoise(model, module, inputs["hidden_states"], level, text, conditions)

    assert torch.equal(inputs["time_ids"], framing)
    torch.testing.assert_close(denoised({"framing": framing}), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(denoised({}), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("zeros", [True, False])
def test_an_empty_caption_is_the_pipelines_unconditional_input(folder: Path, zeros: bool) -> None:
    rewritten(folder / "model_index.json", force_zeros_for_empty_prompt=zeros)
    model = SDXL.read_model(ModelSource(str(folder)))
    _, unconditional, _, pooled = pipeline_of(model).encode_prompt("x", device=CPU)
    text = SDXL.pad_text(model, SDXL.build_text_encoder(model, CPU, torch.float32).encode(["a star", ""]))
    torch.testing.assert_close(text["embeds"][1:], unconditional)
    torch.testing.assert_close(text["pooled"][1:], pooled)
    assert text["embeds"][0].any() and unconditional.any() != zeros


def test_the_encoding_of_a_caption_does_not_depend_on_the_treatment_of_empty_ones(folder: Path) -> None:
    encode = SDXL.build_text_encoder(SDXL.read_model(ModelSource(str(folder))), CPU, torch.float32).encode
    assert encode([""])[0]["embeds"].any()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prediction_type": "sample"}, "prediction_type 'sample'; supported are epsilon, v_prediction"),
        ({"beta_schedule": "exotic"}, "is not one of EulerDiscreteScheduler"),
    ],
)
def test_an_unsupported_scheduler_raises_an_error(folder: Path, changed: dict[str, str], message: str) -> None:
    rewritten(folder / "scheduler" / "scheduler_config.json", **changed)
    with pytest.raises(ModelError, match=message):
        SDXL.read_model(ModelSource(str(folder)))


def test_a_scheduler_without_a_table_raises_an_error(folder: Path) -> None:
    rewritten(folder / "model_index.json", scheduler=["diffusers", "EDMEulerScheduler"])
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    with pytest.raises(ModelError, match="EDMEulerScheduler has no table of alphas_cumprod"):
        SDXL.read_model(ModelSource(str(folder)))


def test_the_preset_all_layers_has_every_linear_layer_and_every_convolution(model: ModelDescription) -> None:
    module = SDXL.load_denoiser(model, model.experts[0], torch.float32)
    kinds = (torch.nn.Linear, torch.nn.Conv2d)
    wanted = {name for name, layer in module.named_modules() if isinstance(layer, kinds)}
    endings = SDXL.target_presets["all_layers"]
    found = {name for name, _ in module.named_modules() if any(f".{name}".endswith(f".{one}") for one in endings)}
    assert found == wanted


def test_an_attention_backend_that_its_layers_do_not_support_raises_an_error(model: ModelDescription) -> None:
    module = SDXL.load_denoiser(model, model.experts[0], torch.float32)
    require_backend_support(module, "native")
    with pytest.raises(ModelError, match="supports only torch's own attention"):
        require_backend_support(module, "_native_math")
