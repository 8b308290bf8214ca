"""`supertuner models`: what it lists, the sizes of weights, and whether they may fit a machine."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from supertuner.cli import app
from supertuner.config.families import FAMILIES
from supertuner.config.settings.model import ModelSettings
from supertuner.core.errors import OptionError
from supertuner.models import loading
from supertuner.models.published_models import PUBLISHED, WeightSizes, describe_model, find_published
from supertuner.models.quantization import quantize_blocks, stored_bytes
from supertuner.tools.model_list import find_capacity, weights_fit

T2V = "Wan-AI/Wan2.2-T2V-A14B-Diffusers"


def models(*options: str) -> str:
    done = CliRunner().invoke(app, ["models", *options])
    assert done.exit_code == 0, done.output
    return done.stdout


def as_json(*options: str) -> Any:
    return json.loads(models(*options, "--json"))


def compute_weights(name: str) -> WeightSizes:
    """The bytes of a published model's modules, built on the meta device."""
    _, model, _ = describe_model(ModelSettings.model_validate({"family": PUBLISHED[name].family, "path": name}))
    denoiser = loading.load_module(model, model.experts[0].component, torch.bfloat16)
    in_16_bits = stored_bytes(denoiser)
    quantize_blocks(denoiser, "int8", torch.device("meta"))
    encoders = [part for part in model.configs if part.startswith(("text_encoder", "vae"))]
    encoder_bytes = sum(stored_bytes(loading.load_module(model, part, torch.bfloat16)) for part in encoders)
    return WeightSizes(in_16_bits, stored_bytes(denoiser), encoder_bytes)


@pytest.mark.parametrize("name", ["Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "stabilityai/stable-diffusion-3.5-medium"])
def test_the_sizes_of_the_table_are_those_of_the_models(name: str) -> None:
    """`tests/torture/test_every_preset.py` has all models."""
    assert compute_weights(name) == PUBLISHED[name].weights


def test_every_family_and_model_is_listed_with_task_and_targets() -> None:
    text = models()
    assert all(name in text for name in (*FAMILIES, *PUBLISHED))
    listed = as_json()["families"]
    assert listed.keys() == FAMILIES.keys() and "all_layers" in listed["sdxl"]["adapter_targets"]
    assert listed["wan2.2"]["models"][T2V]["experts"] == 2
    assert listed["qwen-image-edit"]["models"]["Qwen/Qwen-Image-Edit"]["task"] == "image editing"
    sizes = listed["wan2.2"]["models"][T2V]["weight_bytes"]
    assert sizes["denoiser_8bit"] < 0.52 * sizes["denoiser"]


def test_one_family_can_be_listed_and_an_unknown_one_is_answered_by_the_nearest() -> None:
    assert "FLUX" not in models("sdxl")
    result = CliRunner().invoke(app, ["models", "sdlx"])
    assert isinstance(result.exception, OptionError) and "did you mean sdxl?" in str(result.exception)


def test_a_machine_is_judged_by_weights_alone_and_says_so() -> None:
    listed = as_json("--machine", "rtx-4090")
    assert "no forecast" in listed["machine"]["fit_is"]
    by_name = {name: one for family in listed["families"].values() for name, one in family["models"].items()}
    fits = {name: one["lora_by_weights_alone"]["possible"] for name, one in by_name.items()}
    assert fits == {name: "Wan2.2-T2V-A14B" not in name and "Wan2.2-I2V-A14B" not in name for name in PUBLISHED}
    assert "no forecast" in models("--machine", "gh200-96")


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        ("gh200-96", "may fit in 16 bits: 53.3 GiB of 96.0 GiB"),
        ("gb10", "may fit in 16 bits: 53.3 GiB of 107 GiB"),
        ("rtx-4090", "does not fit: its host memory is not known"),
    ],
)
def test_both_experts_count_where_no_host_memory_is_known(machine: str, text: str) -> None:
    assert weights_fit(PUBLISHED[T2V], find_capacity(machine)).text == text


def test_the_table_finds_names_whatever_their_case() -> None:
    assert find_published(T2V.upper()) is PUBLISHED[T2V] and find_published("someone/else") is None


def test_tasks_and_experts_of_the_table_are_those_that_the_families_read() -> None:
    for name, published in PUBLISHED.items():
        _, model, _ = describe_model(ModelSettings.model_validate({"family": published.family, "path": name}))
        assert len(model.experts) == published.experts, name
        assert model.edits_images == (published.task == "image editing"), name
        assert model.needs_first_frame == (published.task == "image to video"), name
        assert ("video" in model.media_kinds) == ("video" in published.task), name
