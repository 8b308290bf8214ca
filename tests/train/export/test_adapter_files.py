"""Adapter files in every key scheme: the same change of the weights, nothing lost, nothing overwritten."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, WanPipeline
from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from supertuner.core.errors import ModelError
from supertuner.models.adapters.family_layers import FAMILY_LAYERS
from supertuner.models.adapters.keys import AdapterTensorName, format_key, read_keys
from supertuner.models.adapters.keys_convert import adapter_layers
from supertuner.models.adapters.keys_schemes import KEY_SCHEMES, KeyScheme
from supertuner.models.families.tiny_pipelines import build_pipeline
from supertuner.models.families.wan22.family import tiny_wan_pipeline
from supertuner.train.export.adapter_export import export_adapter
from supertuner.train.export.adapter_files import (
    convert_adapter,
    load_adapter_tensors,
    open_adapter,
    select_expert,
    with_expert,
)
from tests.models.adapters.modules import random_tensor, wan_output

RANK = 4
LAYERS = {"blocks.0.attn1.to_q": (24, 24), "blocks.1.attn2.to_out.0": (24, 24), "blocks.1.ffn.net.0.proj": (48, 24)}


def wan_lora(scheme: KeyScheme, alpha: float | None, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A LoRA of both experts, or of one if the scheme has no expert names; all tensors differ."""
    made = {}
    for number, expert in enumerate(FAMILY_LAYERS["wan2.2"].experts if scheme.marks_experts else [None]):
        for layer, (outputs, inputs) in LAYERS.items():
            for tensor, value in {
                "lora_A": random_tensor(RANK, inputs) + number,
                "lora_B": random_tensor(outputs, RANK) - number,
                **({"alpha": torch.tensor(alpha)} if alpha is not None else {}),
            }.items():
                made[format_key(AdapterTensorName(expert, layer, tensor), scheme, "wan2.2")] = value.to(dtype)
    return made


def changes(path: Path, family: str | None = None) -> dict[tuple[str | None, str], torch.Tensor]:
    """(expert, layer) → what the file adds to the weight: the meaning of a file, independent of its key names."""
    file = open_adapter(path, family)
    given = load_file(path)
    found = {}
    for layer in adapter_layers(file.reading):
        a, b = given[layer.keys["lora_A"]].float(), given[layer.keys["lora_B"]].float()
        scale = float(given[layer.keys["alpha"]]) / a.shape[0] if "alpha" in layer.keys else 1.0
        found[layer.expert, layer.module] = scale * b.flatten(1) @ a.flatten(1)
    return found


@pytest.mark.parametrize("alpha", [None, 2.0, 3.0])
@pytest.mark.parametrize("source", ["diffusers-pair", "ai-toolkit-dollars", "lycoris-stages"])
@pytest.mark.parametrize("target", [name for name, scheme in KEY_SCHEMES.items() if scheme.marks_experts])
def test_a_file_of_two_experts_means_the_same_in_every_scheme(
    source: str, target: str, alpha: float | None, tmp_path: Path
) -> None:
    save_file(wan_lora(KEY_SCHEMES[source], alpha), tmp_path / "a.safetensors")
    convert_adapter(open_adapter(tmp_path / "a.safetensors"), KEY_SCHEMES[target], tmp_path / "b.safetensors")
    before, after = changes(tmp_path / "a.safetensors"), changes(tmp_path / "b.safetensors")
    assert before.keys() == after.keys() and len(before) == 2 * len(LAYERS)
    assert all(torch.allclose(before[one], after[one], rtol=1e-6) for one in before)
    assert not torch.allclose(after["high_noise", "blocks.0.attn1.to_q"], after["low_noise", "blocks.0.attn1.to_q"]), (
        "a swapped expert would show"
    )
    found = open_adapter(tmp_path / "b.safetensors")
    assert not found.reading.unknown
    assert found.reading.scheme == KEY_SCHEMES[target]


@pytest.mark.parametrize("target", [name for name, scheme in KEY_SCHEMES.items() if not scheme.marks_experts])
def test_converting_there_and_back_gives_the_file_to_the_bit(target: str, tmp_path: Path) -> None:
    """An alpha equal to the rank changes no value; otherwise the scale moves into the values."""
    scheme = KEY_SCHEMES["kohya"]
    given = wan_lora(scheme, float(RANK), torch.bfloat16)
    save_file(given, tmp_path / "a.safetensors", {"ss_network_dim": "4"})
    convert_adapter(open_adapter(tmp_path / "a.safetensors"), KEY_SCHEMES[target], tmp_path / "b.safetensors")
    convert_adapter(open_adapter(tmp_path / "b.safetensors"), scheme, tmp_path / "c.safetensors", overwrite=True)
    back = load_file(tmp_path / "c.safetensors")
    assert back.keys() == given.keys()
    assert all(torch.equal(back[key].to(value.dtype), value) for key, value in given.items())
    with safe_open(tmp_path / "c.safetensors", "pt") as opened:
        assert opened.metadata()["ss_network_dim"] == "4"


@pytest.mark.parametrize("source", ["kohya", "original", "original-down-up", "lycoris", "ai-toolkit-dollars"])
def test_an_export_for_diffusers_loads_into_both_experts_of_the_pipeline(source: str, tmp_path: Path) -> None:
    scheme = KEY_SCHEMES[source]
    for stage, expert in enumerate(("high_noise", "low_noise")):
        file = tmp_path / f"mine_{expert}.safetensors"
        if scheme.marks_experts:
            file = tmp_path / "mine.safetensors"
        save_file(
            {
                key: value * (1 + stage if not scheme.marks_experts else 1)
                for key, value in wan_lora(scheme, 2.0).items()
            },
            file,
        )
        opened = with_expert(open_adapter(file), None)
        export_adapter(opened, "diffusers", overwrite=scheme.marks_experts)
    pipeline = build_pipeline(tiny_wan_pipeline, seed=3)
    assert isinstance(pipeline, WanPipeline)
    bare = build_pipeline(tiny_wan_pipeline, seed=3)
    for expert, part in (("high_noise", "transformer"), ("low_noise", "transformer_2")):
        made = tmp_path / f"mine_{expert}.diffusers.safetensors"
        pipeline.load_lora_weights(made, load_into_transformer_2=part == "transformer_2")
        source_file = tmp_path / ("mine.safetensors" if scheme.marks_experts else f"mine_{expert}.safetensors")
        wanted = changes(source_file)
        module = getattr(bare, part)
        for layer in LAYERS:
            weight = module.get_submodule(layer).weight
            weight.data += wanted[expert if scheme.marks_experts else None, layer]
        difference = (wan_output(getattr(pipeline, part)) - wan_output(module)).abs().max()
        untrained = wan_output(getattr(build_pipeline(tiny_wan_pipeline, seed=3), part))
        assert difference < 1e-4 * (untrained - wan_output(module)).abs().max(), difference


def test_a_fused_layer_is_split_as_diffusers_splits_it(tmp_path: Path) -> None:
    given = {}
    for key, outputs in {
        "double_blocks_0_img_attn_qkv": 9216,
        "single_blocks_3_linear1": 21504,
        "double_blocks_1_txt_mlp_0": 8,
    }.items():
        given |= {
            f"lora_unet_{key}.lora_down.weight": random_tensor(RANK, 6),
            f"lora_unet_{key}.lora_up.weight": random_tensor(outputs, RANK),
            f"lora_unet_{key}.alpha": torch.tensor(2.0),
        }
    save_file(given, tmp_path / "a.safetensors")
    export_adapter(open_adapter(tmp_path / "a.safetensors"), "diffusers", tmp_path / "b.safetensors")
    theirs = _convert_kohya_flux_lora_to_diffusers(dict(given))
    ours = load_file(tmp_path / "b.safetensors")
    assert ours.keys() == theirs.keys() and len(ours) == 16
    for layer in {key.rsplit(".", 2)[0] for key in ours}:
        product = ours[f"{layer}.lora_B.weight"] @ ours[f"{layer}.lora_A.weight"]
        assert torch.allclose(product, theirs[f"{layer}.lora_B.weight"] @ theirs[f"{layer}.lora_A.weight"], atol=1e-5)


@pytest.mark.parametrize("target", ["diffusers", "kohya", "lycoris-stages"])
def test_loaded_tensors_are_those_that_a_conversion_writes(target: str, tmp_path: Path) -> None:
    save_file(wan_lora(KEY_SCHEMES["original-down-up"], 3.0, torch.bfloat16), tmp_path / "a.safetensors")
    opened = with_expert(open_adapter(tmp_path / "a.safetensors"), "high_noise")
    convert_adapter(opened, KEY_SCHEMES[target], tmp_path / "b.safetensors")
    written, loaded = load_file(tmp_path / "b.safetensors"), load_adapter_tensors(opened, KEY_SCHEMES[target])
    assert loaded.keys() == written.keys()
    assert all(torch.equal(loaded[key], value) and loaded[key].dtype == value.dtype for key, value in written.items())


@pytest.mark.parametrize("scheme", ["kohya", "original"])
def test_parts_of_a_fused_layer_are_joined_as_diffusers_splits_them(scheme: str, tmp_path: Path) -> None:
    """With one part missing, and with several ranks."""
    outputs = {
        "transformer_blocks.0.attn.to_q": 3072,
        "transformer_blocks.0.attn.to_v": 3072,
        "single_transformer_blocks.2.attn.to_k": 3072,
        "single_transformer_blocks.2.proj_mlp": 12288,
        "transformer_blocks.0.attn.to_out.0": 8,
    }
    given = {}
    for number, (layer, rows) in enumerate(outputs.items()):
        given[f"transformer.{layer}.lora_A.weight"] = random_tensor(2 + number, 6)
        given[f"transformer.{layer}.lora_B.weight"] = random_tensor(rows, 2 + number)
    save_file(given, tmp_path / "a.safetensors")
    convert_adapter(open_adapter(tmp_path / "a.safetensors"), KEY_SCHEMES[scheme], tmp_path / "b.safetensors")
    made = load_file(tmp_path / "b.safetensors")
    spelled_as_kohya = {
        key.replace("lora_A.", "lora_down.").replace("lora_B.", "lora_up."): value for key, value in made.items()
    }
    theirs = _convert_kohya_flux_lora_to_diffusers(spelled_as_kohya)
    for layer in outputs:
        wanted = given[f"transformer.{layer}.lora_B.weight"] @ given[f"transformer.{layer}.lora_A.weight"]
        found = theirs[f"transformer.{layer}.lora_B.weight"] @ theirs[f"transformer.{layer}.lora_A.weight"]
        assert torch.allclose(found, wanted, atol=1e-5), layer
    assert not theirs["transformer.transformer_blocks.0.attn.to_k.lora_B.weight"].any(), "it was not in the file"
    back = tmp_path / "c.safetensors"
    convert_adapter(open_adapter(tmp_path / "b.safetensors"), KEY_SCHEMES["diffusers"], back)
    before, after = changes(tmp_path / "a.safetensors"), changes(back)
    assert all(torch.allclose(after[one], before[one], atol=1e-5) for one in before)


def test_parts_that_cannot_be_joined_are_refused(tmp_path: Path) -> None:
    save_file({"lycoris_transformer_blocks_0_attn_to_q.lokr_w1": random_tensor(2, 2)}, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match="only plain LoRA"):
        convert_adapter(
            open_adapter(tmp_path / "a.safetensors", "flux"), KEY_SCHEMES["kohya"], tmp_path / "b.safetensors"
        )
    layer = "transformer.transformer_blocks.0.attn"
    given = {f"{layer}.to_{to}.lora_{side}.weight": random_tensor(4, 4) for to in "qkv" for side in "AB"}
    given[f"{layer}.to_k.lora_B.weight"] = random_tensor(5, 4)
    save_file(given, tmp_path / "c.safetensors")
    with pytest.raises(ModelError, match="do not fit together"):
        convert_adapter(
            open_adapter(tmp_path / "c.safetensors", "flux"), KEY_SCHEMES["kohya"], tmp_path / "b.safetensors"
        )
    assert not (tmp_path / "b.safetensors").exists()


def test_an_alpha_in_diffusers_metadata_is_used(tmp_path: Path) -> None:
    settings = {
        "transformer.r": RANK,
        "transformer.lora_alpha": 8,
        "transformer.alpha_pattern": {"blocks.1.ffn.net.0.proj": 2},
    }
    given = wan_lora(KEY_SCHEMES["diffusers"], None)
    save_file(given, tmp_path / "a.safetensors", {"lora_adapter_metadata": json.dumps(settings)})
    convert_adapter(open_adapter(tmp_path / "a.safetensors"), KEY_SCHEMES["kohya"], tmp_path / "b.safetensors")
    made = load_file(tmp_path / "b.safetensors")
    assert float(made["lora_unet_blocks_0_self_attn_q.alpha"]) == 8
    assert float(made["lora_unet_blocks_1_ffn_0.alpha"]) == 2
    convert_adapter(open_adapter(tmp_path / "b.safetensors"), KEY_SCHEMES["diffusers"], tmp_path / "c.safetensors")
    with safe_open(tmp_path / "c.safetensors", "pt") as opened:
        assert "lora_adapter_metadata" not in opened.metadata(), "it would count twice"
    key = "transformer.blocks.0.attn1.to_q.lora_B.weight"
    assert torch.equal(load_file(tmp_path / "c.safetensors")[key], 2 * given[key])


def test_each_expert_has_the_alpha_of_its_part_of_diffusers_metadata(tmp_path: Path) -> None:
    settings = {"transformer.lora_alpha": 8, "transformer_2.lora_alpha": 2, "text_encoder.lora_alpha": 5}
    metadata = {"lora_adapter_metadata": json.dumps(settings)}
    save_file(wan_lora(KEY_SCHEMES["diffusers-pair"], None), tmp_path / "a.safetensors", metadata)
    convert_adapter(open_adapter(tmp_path / "a.safetensors"), KEY_SCHEMES["lycoris-stages"], tmp_path / "b.safetensors")
    made = load_file(tmp_path / "b.safetensors")
    alphas = {key.split("_blocks")[0]: float(made[key]) for key in made if key.endswith(".alpha")}
    assert alphas == {"lycoris_transformer_1": 8.0, "lycoris_transformer_2": 2.0}
    of_one = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 3})}
    save_file(wan_lora(KEY_SCHEMES["diffusers"], None), tmp_path / "c_low_noise.safetensors", of_one)
    opened = with_expert(open_adapter(tmp_path / "c_low_noise.safetensors"), None)
    convert_adapter(opened, KEY_SCHEMES["kohya"], tmp_path / "d.safetensors")
    assert {float(one) for key, one in load_file(tmp_path / "d.safetensors").items() if "alpha" in key} == {3.0}


@pytest.mark.parametrize(
    "pattern",
    [
        "^blocks\\.1\\.ffn\\.net\\.0\\.proj",
        "net.0.proj",
        "blocks.1.ffn.*",
        r"blocks\.\d+\.ffn.*",
        "blocks.1",
        "proj",
        "roj",
        "^net.0.proj",
    ],
)
def test_patterns_of_diffusers_metadata_mean_what_they_mean_to_peft(pattern: str, tmp_path: Path) -> None:
    settings = {"transformer.lora_alpha": 8, "transformer.alpha_pattern": {pattern: 2}}
    save_file(
        wan_lora(KEY_SCHEMES["diffusers"], None),
        tmp_path / "a.safetensors",
        {"lora_adapter_metadata": json.dumps(settings)},
    )
    convert_adapter(open_adapter(tmp_path / "a.safetensors"), KEY_SCHEMES["kohya"], tmp_path / "b.safetensors")
    made = load_file(tmp_path / "b.safetensors")
    for layer, key in {
        "blocks.0.attn1.to_q": "lora_unet_blocks_0_self_attn_q",
        "blocks.1.ffn.net.0.proj": "lora_unet_blocks_1_ffn_0",
    }.items():
        peft_s = {pattern: 2}.get(get_pattern_key([pattern], layer), 8)
        assert float(made[f"{key}.alpha"]) == peft_s, layer


@pytest.mark.parametrize("pattern", ["(a+)+$", "(.*a){9}", ".*.*.*.*q", "blocks[", "a|b", ""])
def test_a_pattern_with_unbounded_matching_time_is_refused(pattern: str, tmp_path: Path) -> None:
    settings = {"transformer.alpha_pattern": {pattern: 2}}
    save_file(
        wan_lora(KEY_SCHEMES["diffusers"], None),
        tmp_path / "a.safetensors",
        {"lora_adapter_metadata": json.dumps(settings)},
    )
    with pytest.raises(ModelError, match="too complex to be evaluated safely"):
        convert_adapter(open_adapter(tmp_path / "a.safetensors"), KEY_SCHEMES["kohya"], tmp_path / "b.safetensors")


def test_dora_s_magnitudes_are_a_row_for_peft_and_a_column_for_others(tmp_path: Path) -> None:
    given = wan_lora(KEY_SCHEMES["diffusers"], None)
    given["transformer.blocks.0.attn1.to_q.lora_magnitude_vector"] = random_tensor(24)
    save_file(given, tmp_path / "a.safetensors")
    convert_adapter(open_adapter(tmp_path / "a.safetensors"), KEY_SCHEMES["kohya"], tmp_path / "b.safetensors")
    assert load_file(tmp_path / "b.safetensors")["lora_unet_blocks_0_self_attn_q.dora_scale"].shape == (24, 1)
    convert_adapter(open_adapter(tmp_path / "b.safetensors"), KEY_SCHEMES["diffusers"], tmp_path / "c.safetensors")
    back = load_file(tmp_path / "c.safetensors")
    assert all(torch.equal(back[key], value) for key, value in given.items())


@pytest.mark.parametrize("family", FAMILY_LAYERS)
def test_an_export_for_comfyui_has_names_that_comfyui_reads(family: str, tmp_path: Path) -> None:
    row = next(
        row
        for row in FAMILY_LAYERS[family].original_names
        if "blocks.#" in row or ("blocks.0" in row and "conv1" in row)
    )
    layer = row.replace("#", "0")
    given = {
        format_key(AdapterTensorName(None, layer, tensor), KEY_SCHEMES["bare"], family): random_tensor(4, 4)
        for tensor in ("lora_A", "lora_B")
    }
    save_file(given, tmp_path / "a.safetensors")
    (made,) = export_adapter(open_adapter(tmp_path / "a.safetensors", family), "comfyui", tmp_path / "b.safetensors")
    found = open_adapter(made.path, family)
    assert made.tensors >= 2 and FAMILY_LAYERS[family].comfyui_loads(found.reading.scheme)
    assert found.reading.scheme.style == KEY_SCHEMES[FAMILY_LAYERS[family].comfyui_scheme].style


def test_dora_is_written_for_comfyui_with_the_only_key_it_reads(tmp_path: Path) -> None:
    given = wan_lora(KEY_SCHEMES["diffusers"], None)
    given["transformer.blocks.0.attn1.to_q.lora_magnitude_vector"] = random_tensor(24)
    save_file(given, tmp_path / "a.safetensors")
    factors = {"blocks.0.attn1.to_q": torch.full((24,), 2.0)}
    (made,) = export_adapter(open_adapter(tmp_path / "a.safetensors"), "comfyui", magnitude_factors=factors)
    written = load_file(made.path)["diffusion_model.blocks.0.self_attn.q.dora_scale"]
    magnitudes = given["transformer.blocks.0.attn1.to_q.lora_magnitude_vector"]
    assert torch.equal(written, 2 * magnitudes.reshape(24, 1))
    assert FAMILY_LAYERS["wan2.2"].comfyui_loads(open_adapter(made.path).reading.scheme, dora=True)
    assert not FAMILY_LAYERS["wan2.2"].comfyui_loads(KEY_SCHEMES["original"], dora=True)


def test_the_expert_of_a_file_must_be_the_requested_one(tmp_path: Path) -> None:
    save_file(wan_lora(KEY_SCHEMES["ai-toolkit"], None), tmp_path / "both.safetensors")
    with pytest.raises(ModelError, match="for high_noise and low_noise, not for low_noise"):
        with_expert(open_adapter(tmp_path / "both.safetensors"), "low_noise")
    one = {key: value for key, value in wan_lora(KEY_SCHEMES["diffusers"], None).items()}
    save_file(one, tmp_path / "x.safetensors", {"supertuner": json.dumps({"expert": "high_noise"})})
    assert with_expert(open_adapter(tmp_path / "x.safetensors"), None).reading.experts == ("high_noise",)
    with pytest.raises(ModelError, match="trained for high_noise by its metadata, not for low_noise"):
        with_expert(open_adapter(tmp_path / "x.safetensors"), "low_noise")
    (tmp_path / "x.safetensors").rename(tmp_path / "x_low_noise.safetensors")
    with pytest.raises(ModelError, match="is for low_noise by its name, and for high_noise"):
        with_expert(open_adapter(tmp_path / "x_low_noise.safetensors"), None)
    save_file(one, tmp_path / "y_low_noise.safetensors")
    assert with_expert(open_adapter(tmp_path / "y_low_noise.safetensors"), None).reading.experts == ("low_noise",)
    with pytest.raises(ModelError, match="is for low_noise by its name, and for high_noise"):
        with_expert(open_adapter(tmp_path / "y_low_noise.safetensors"), "high_noise")


def test_two_experts_are_not_written_into_a_scheme_without_expert_names(tmp_path: Path) -> None:
    save_file(wan_lora(KEY_SCHEMES["ai-toolkit"], None), tmp_path / "a.safetensors")
    opened = open_adapter(tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match="cannot name an expert"):
        convert_adapter(opened, KEY_SCHEMES["kohya"], tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()
    assert len(select_expert(opened, "low_noise").reading.names) == 2 * len(LAYERS)


def test_nothing_is_overwritten_without_request(tmp_path: Path) -> None:
    save_file(wan_lora(KEY_SCHEMES["kohya"], None), tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_text("mine")
    opened = open_adapter(tmp_path / "a.safetensors")
    for attempt in (
        lambda: convert_adapter(opened, KEY_SCHEMES["diffusers"], tmp_path / "b.safetensors"),
        lambda: export_adapter(opened, "diffusers", tmp_path / "b.safetensors"),
    ):
        with pytest.raises(ModelError, match="exists"):
            attempt()
    assert (tmp_path / "b.safetensors").read_text() == "mine"
    convert_adapter(opened, KEY_SCHEMES["diffusers"], tmp_path / "b.safetensors", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    save_file(wan_lora(KEY_SCHEMES["kohya"], None), tmp_path / "a.safetensors")
    opened = open_adapter(tmp_path / "a.safetensors")
    os.truncate(tmp_path / "a.safetensors", 3000)
    with pytest.raises(ModelError, match="became shorter"):
        convert_adapter(opened, KEY_SCHEMES["diffusers"], tmp_path / "b.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_no_more_than_one_tensor_is_in_memory(tmp_path: Path) -> None:
    large = {
        format_key(
            AdapterTensorName(None, f"blocks.{n}.ffn.net.0.proj", tensor), KEY_SCHEMES["kohya"], "wan2.2"
        ): torch.zeros(size)
        for n in range(8)
        for tensor, size in (("lora_A", (1024, 4096)), ("lora_B", (4096, 1024)))
    }
    save_file(large, tmp_path / "a.safetensors")
    opened = open_adapter(tmp_path / "a.safetensors")
    del large
    tracemalloc.start()
    convert_adapter(opened, KEY_SCHEMES["diffusers"], tmp_path / "b.safetensors")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 17 << 20, f"{peak} bytes for tensors of 16 MiB"


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1.5), (torch.bfloat16, 4.5)], ids=["fp32", "bf16"])
def test_no_more_than_one_tensor_is_in_memory_when_scaling(dtype: torch.dtype, most: float, tmp_path: Path) -> None:
    """Measured as memory of the process, torch's included. In bf16 the product is computed in fp32, twice as large."""
    many = {
        format_key(AdapterTensorName(None, f"blocks.{n}.ffn.net.0.proj", tensor), KEY_SCHEMES["kohya"], "wan2.2"): value
        for n in range(4)
        for tensor, value in {
            "lora_A": torch.zeros(8, 64, dtype=dtype),
            "lora_B": torch.ones((4 << 20) // dtype.itemsize, 8, dtype=dtype),
            "alpha": torch.tensor(4.0),
        }.items()
    }
    save_file(many, tmp_path / "a.safetensors")
    del many
    opened = open_adapter(tmp_path / "a.safetensors")
    before = peak_memory(reset=True)
    convert_adapter(opened, KEY_SCHEMES["diffusers"], tmp_path / "b.safetensors")
    assert (peak_memory() - before) / (32 << 20) < most
    assert load_file(tmp_path / "b.safetensors")["transformer.blocks.3.ffn.net.0.proj.lora_B.weight"].eq(0.5).all()


def peak_memory(reset: bool = False) -> int:
    """The peak resident memory since the last reset, and the current one."""
    if reset:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError as error:
            pytest.skip(f"the peak of memory cannot be reset here: {error}")
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def header(text: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def one_tensor(data: bytes = b"0000", metadata: object = None, **facts: object) -> bytes:
    described = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **facts}
    more = {} if metadata is None else {"__metadata__": metadata}
    key = "transformer.blocks.0.attn1.to_q.lora_A.weight"
    return header(json.dumps({**more, key: described}).encode(), data=data)


def test_the_base_of_the_hostile_files_is_valid(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(one_tensor(metadata={"x": "1"}))
    assert open_adapter(tmp_path / "a.safetensors").metadata == {"x": "1"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04\x95pickle",
        header(b"{}", 1 << 62),
        header(b"[" * 100_000),
        header(b"{not json"),
        header(b"[]"),
        one_tensor(shape=[1 << 40, 1 << 40]),
        one_tensor(shape=[-1], data_offsets=[4, 0]),
        one_tensor(dtype="O"),
        one_tensor(shape=[2], data_offsets=[0, 8]),
        one_tensor(data=b"00000000"),
        one_tensor(data=b""),
        one_tensor(metadata=["x"]),
        one_tensor(metadata={"x": 1}),
    ],
)
def test_a_hostile_file_is_refused_with_a_message(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="safetensors file"):
        open_adapter(tmp_path / "a.safetensors")


def test_a_path_that_is_no_adapter_file_is_refused_with_a_message(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, why in ((tmp_path, "is not a file"), (tmp_path / "pipe", "is not a file"), (tmp_path / "none", "opened")):
        with pytest.raises(ModelError, match=why):
            open_adapter(path)
    save_file({"model.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"none of 1 keys .* model\.weight"):
        open_adapter(tmp_path / "model.safetensors")


def test_an_alpha_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    given = wan_lora(KEY_SCHEMES["kohya"], float("nan"))
    save_file(given, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match="not one finite number"):
        convert_adapter(open_adapter(tmp_path / "a.safetensors"), KEY_SCHEMES["diffusers"], tmp_path / "b.safetensors")


def test_diffusers_own_flux_file_is_read(tmp_path: Path) -> None:
    name = "transformer_blocks.0.attn.to_q"
    FluxPipeline.save_lora_weights(
        tmp_path, {f"{name}.lora_A.weight": random_tensor(2, 4), f"{name}.lora_B.weight": random_tensor(4, 2)}
    )
    [file] = tmp_path.iterdir()
    found = open_adapter(file)
    assert found.reading.scheme == KEY_SCHEMES["diffusers"] and not found.reading.unknown
    assert read_keys(found.entries, "flux").family == "flux"
