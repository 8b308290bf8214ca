"""Keys come from the programs themselves: peft, lycoris-lora, and diffusers' converters of LoRA and of whole models.

Our tables are held against what those produce, never against themselves.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from diffusers.loaders import lora_conversion_utils as converters
from diffusers.loaders import single_file_utils as originals
from diffusers.models import UNet2DConditionModel
from lycoris import LycorisNetwork, create_lycoris
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from torch import nn

from supertuner.models.adapters.family_layers import FAMILY_LAYERS
from supertuner.models.adapters.keys import AdapterTensorName, format_key, read_keys
from supertuner.models.adapters.keys_modules import fused_members
from supertuner.models.adapters.keys_schemes import KEY_SCHEMES, KeyScheme
from tests.models.adapters.architectures import architecture, layers
from tests.models.adapters.modules import flux, wan

Tensors = dict[str, torch.Tensor]
RANK = 4


@pytest.fixture(autouse=True)
def silence_loggers() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    yield
    logging.disable(before)


def original_rows(family: str) -> list[tuple[str, str]]:
    """(canonical layer, original name) of every layer of the full-size model that has both."""
    found = []
    for key, name in _canonical(family).items():
        found.append((name, key.removeprefix("diffusion_model.").removesuffix(".lora_A.weight")))
    return found


def _canonical(family: str) -> dict[str, str]:
    from tests.models.adapters.test_keys import canonical_layers

    return {
        format_key(AdapterTensorName(None, layer, "lora_A"), KEY_SCHEMES["original"], family): layer
        for layer in canonical_layers(family, "original")
    }


# ── the original's names, against diffusers' converters of whole models ──────────────────────────────────────────────


def marked(number: int, rows: int = 2) -> torch.Tensor:
    """A tensor filled with a number that identifies it."""
    return torch.full((rows, 1), float(number))


def test_the_original_names_of_wan_agree_with_diffusers_converter() -> None:
    rows = original_rows("wan2.2")
    converted = originals.convert_wan_transformer_to_diffusers(
        {f"{theirs}.weight": marked(number) for number, (_, theirs) in enumerate(rows)}
    )
    where = {int(tensor[0, 0]): name for name, tensor in converted.items()}
    assert [where[number] for number in range(len(rows))] == [f"{ours}.weight" for ours, _ in rows]
    assert len(rows) == len(layers("wan2.2"))


def test_the_original_names_of_flux_agree_with_diffusers_converter() -> None:
    rows = original_rows("flux")
    given: Tensors = {
        "final_layer.adaLN_modulation.1.weight": marked(-1),
        "final_layer.adaLN_modulation.1.bias": marked(-1),
    }
    for number, (ours, theirs) in enumerate(rows):
        norm = ".norm." in theirs
        size = 21504 if len(fused_members(ours)) == 4 else 3 if len(fused_members(ours)) == 3 else 2
        given[f"{theirs}.{'scale' if norm else 'weight'}"] = marked(number, size)
        if not norm:
            given[f"{theirs}.bias"] = marked(number, size)
    converted = originals.convert_flux_transformer_checkpoint_to_diffusers(given)
    for number, (ours, _) in enumerate(rows):
        for one in fused_members(ours):
            assert int(converted[f"{one}.weight"][0, 0]) == number


def test_the_original_names_of_sd3_agree_with_diffusers_converter() -> None:
    rows = original_rows("sd3.5")
    given: Tensors = {"pos_embed": marked(-1)}
    for block in range(24):
        for end in ("weight", "bias"):
            given[f"joint_blocks.{block}.context_block.adaLN_modulation.1.{end}"] = torch.zeros(3072, 1)
    for end in ("weight", "bias"):
        given[f"final_layer.adaLN_modulation.1.{end}"] = torch.zeros(3072, 1)
    for number, (ours, theirs) in enumerate(rows):
        for end in ("weight", "bias"):
            given[f"{theirs}.{end}"] = marked(
                number, 1536 if theirs == "context_embedder" else 3 * len(fused_members(ours))
            )
    converted = originals.convert_sd3_transformer_checkpoint_to_diffusers(given)
    for number, (ours, _) in enumerate(rows):
        for one in fused_members(ours):
            assert int(converted[f"{one}.weight"][0, 0]) == number


def test_the_original_names_of_sdxl_agree_with_diffusers_converter() -> None:
    rows = original_rows("sdxl")
    prefix = "model.diffusion_model."
    given = {
        f"{prefix}{theirs}.{end}": marked(number)
        for number, (_, theirs) in enumerate(rows)
        for end in ("weight", "bias")
    }
    unet = architecture("sdxl")
    assert isinstance(unet, UNet2DConditionModel)
    converted = originals.convert_ldm_unet_checkpoint(given, dict(unet.config))
    for number, (ours, _) in enumerate(rows):
        assert int(converted[f"{ours}.weight"][0, 0]) == number
    assert len(rows) == len(layers("sdxl"))


# ── LoRA files of others, against diffusers' converters of LoRA ──────────────────────────────────────────────────────


def lora_file(family: str, scheme: KeyScheme, layers_: list[str], alpha: bool) -> tuple[Tensors, dict[str, float]]:
    """A file in the scheme, and for each layer the number that fills its matrices."""
    found: Tensors = {}
    numbers = {layer: float(number + 1) for number, layer in enumerate(layers_)}
    for layer, number in numbers.items():
        found[format_key(AdapterTensorName(None, layer, "lora_A"), scheme, family)] = torch.full((RANK, 8), number)
        found[format_key(AdapterTensorName(None, layer, "lora_B"), scheme, family)] = torch.full((8, RANK), number)
        if alpha:
            found[format_key(AdapterTensorName(None, layer, "alpha"), scheme, family)] = torch.tensor(float(RANK))
    return found, numbers


def check(converted: Tensors, numbers: dict[str, float], family: str, part: str = "transformer") -> None:
    """The converter gave every layer its own matrices, and `read_keys` agrees with it."""
    for layer, number in numbers.items():
        assert float(converted[f"{part}.{layer}.lora_A.weight"][0, 0]) == number, layer
        assert float(converted[f"{part}.{layer}.lora_B.weight"][0, 0]) == number, layer
    found = read_keys(converted, family)
    assert not found.unknown
    assert {name.module for name in found.names.values()} == set(numbers)


WAN_BLOCK = re.compile(r"blocks\.\d+\.(attn\d\.to_|attn2\.add_|ffn\.)")


@pytest.mark.parametrize("scheme", ["original", "original-down-up"])
def test_diffusers_reads_a_wan_lora_with_original_names(scheme: str) -> None:
    wanted = [one for one in layers("wan2.2") if WAN_BLOCK.match(one)]
    given, numbers = lora_file("wan2.2", KEY_SCHEMES[scheme], wanted, alpha=scheme != "original")
    check(converters._convert_non_diffusers_wan_lora_to_diffusers(given), numbers, "wan2.2")


def test_diffusers_reads_the_other_layers_of_wan_with_original_names() -> None:
    """Without alpha, which diffusers does not support for these layers."""
    rest = [one for one in layers("wan2.2") if not one.startswith("blocks.") and "norm" not in one]
    rest.remove("patch_embedding")  # diffusers supports no LoRA of it
    given, numbers = lora_file("wan2.2", KEY_SCHEMES["original"], ["blocks.0.attn1.to_q", *rest], alpha=False)
    check(converters._convert_non_diffusers_wan_lora_to_diffusers(given), numbers, "wan2.2")


def test_diffusers_reads_a_wan_lora_of_musubi_tuner() -> None:
    wanted = [one for one in layers("wan2.2") if WAN_BLOCK.match(one) and "add_" not in one]
    given, numbers = lora_file("wan2.2", KEY_SCHEMES["kohya"], wanted, alpha=True)
    check(converters._convert_musubi_wan_lora_to_diffusers(given), numbers, "wan2.2")


@pytest.mark.parametrize("scheme", ["kohya-diffusers", "original", "original-down-up"])
def test_diffusers_reads_a_qwen_lora(scheme: str) -> None:
    wanted = [one for one in layers("qwen-image") if "norm_" not in one.replace("norm_out", "") and one != "txt_norm"]
    given, numbers = lora_file("qwen-image", KEY_SCHEMES[scheme], wanted, alpha=scheme != "original")
    check(converters._convert_non_diffusers_qwen_lora_to_diffusers(given), numbers, "qwen-image")


def test_diffusers_reads_a_flux_lora_of_kohya_without_fused_layers() -> None:
    rows = FAMILY_LAYERS["flux"].original_names
    wanted = [
        one
        for one in layers("flux")
        if one.startswith(("transformer_blocks.", "single_transformer_blocks."))
        and rows[re.sub(r"blocks\.\d+", "blocks.#", one)] is not None
        and "norm_" not in one
    ]
    given, numbers = lora_file("flux", KEY_SCHEMES["kohya"], wanted, alpha=True)
    check(converters._convert_kohya_flux_lora_to_diffusers(given), numbers, "flux")


def test_diffusers_reads_a_flux_lora_of_onetrainer() -> None:
    wanted = [one for one in layers("flux") if ".attn.to_" in one or ("_proj" in one and ".attn." in one)]
    given, numbers = lora_file("flux", KEY_SCHEMES["onetrainer"], wanted, alpha=True)
    check(converters._convert_kohya_flux_lora_to_diffusers(given), numbers, "flux")


SDXL_KNOWN = ("to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2", "conv1", "conv2")


@pytest.mark.parametrize("scheme", ["kohya", "kohya-diffusers"])
def test_diffusers_reads_an_sdxl_lora_of_kohya(scheme: str) -> None:
    wanted = [one for one in layers("sdxl") if one.endswith(SDXL_KNOWN)]
    given, numbers = lora_file("sdxl", KEY_SCHEMES[scheme], wanted, alpha=True)
    unet = architecture("sdxl")
    assert isinstance(unet, UNet2DConditionModel)
    mapped = converters._maybe_map_sgm_blocks_to_diffusers(given, unet.config)
    converted, alphas = converters._convert_non_diffusers_lora_to_diffusers(mapped)
    assert len(alphas) == len(wanted)
    found = {
        re.sub(r"\.processor|(_lora|\.lora)\.down\.weight$", "", key.removeprefix("unet.")): float(tensor[0, 0])
        for key, tensor in converted.items()
        if ".down." in key
    }
    assert found == {layer.replace("to_out.0", "to_out"): number for layer, number in numbers.items()}


# ── what peft and lycoris-lora write themselves ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dora", [False, True])
def test_all_keys_of_peft_are_read(dora: bool) -> None:
    module = wan()
    targets = ["to_q", "to_out.0", "ffn.net.2", "proj_out", "patch_embedding", "time_proj"]
    inject_adapter_in_model(LoraConfig(r=2, target_modules=targets, use_dora=dora, lora_bias=False), module)
    keys = get_peft_model_state_dict(module)
    found = read_keys(keys)
    assert not found.unknown and found.families == ("wan2.2",)
    assert found.scheme == KEY_SCHEMES["bare"]
    assert [format_key(name, found.scheme, "wan2.2") for name in found.names.values()] == list(keys)
    inside = [name for name, parameter in module.named_parameters() if "lora_" in name and parameter.requires_grad]
    assert read_keys(inside).scheme.spelling == "peft, adapter named" and not read_keys(inside).unknown


@pytest.mark.parametrize("algo", ["lora", "loha", "lokr", "full"])
@pytest.mark.parametrize(("make", "family"), [(wan, "wan2.2"), (flux, "flux")])
def test_all_keys_of_lycoris_are_read(
    algo: str, make: Callable[[], nn.Module], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in ("TARGET_REPLACE_MODULE", "TARGET_REPLACE_NAME", "ENABLE_CONV"):
        monkeypatch.setattr(LycorisNetwork, setting, getattr(LycorisNetwork, setting))
    module = make()
    LycorisNetwork.apply_preset({"target_module": [type(module).__name__], "target_name": [], "enable_conv": True})
    network = create_lycoris(
        module, 1.0, linear_dim=2, linear_alpha=1, conv_dim=2, conv_alpha=1, factor=2, algo=algo, dora_wd=algo != "full"
    )
    network.apply_to()
    keys = network.state_dict()
    found = read_keys(keys)
    assert not found.unknown, found.summary()
    assert family in found.families
    assert found.scheme.style == "lycoris"
    assert [format_key(name, KEY_SCHEMES["lycoris"], family) for name in found.names.values()] == list(keys)
    layers_ = {name for name, one in module.named_modules() if isinstance(one, nn.Linear | nn.Conv3d)}
    assert {name.module for name in found.names.values()} == layers_


def test_swapped_experts_have_different_keys_in_diffusers() -> None:
    """The high-noise expert is `transformer` in diffusers and `transformer_1` in ai-toolkit, the low one is `_2`."""
    given = {
        f"transformer_{stage}.blocks.0.attn1.to_q.lora_{side}.weight": torch.full((2, 2), float(stage))
        for stage in (1, 2)
        for side in "AB"
    }
    found = read_keys(given)
    assert found.scheme == KEY_SCHEMES["ai-toolkit"]
    pair = {format_key(name, KEY_SCHEMES["diffusers-pair"], "wan2.2"): given[key] for key, name in found.names.items()}
    assert float(pair["transformer.blocks.0.attn1.to_q.lora_A.weight"][0, 0]) == 1
    assert float(pair["transformer_2.blocks.0.attn1.to_q.lora_A.weight"][0, 0]) == 2
    assert FAMILY_LAYERS["wan2.2"].experts == {"high_noise": "transformer", "low_noise": "transformer_2"}
