"""Names of older and rarer trainers are read as diffusers reads them: XLabs, VideoX-Fun, diffusers before 0.22."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_xlabs_flux_lora_to_diffusers
from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft
from safetensors.torch import load_file, save_file

from supertuner.models.adapters.keys_schemes import KEY_SCHEMES
from supertuner.train.export.adapter_export import export_adapter
from supertuner.train.export.adapter_files import convert_adapter, open_adapter
from tests.models.adapters.modules import random_tensor

WIDTH, RANK = 12, 2


def lora_pair(name: str, outputs: int) -> dict[str, torch.Tensor]:
    return {f"{name}.down.weight": random_tensor(RANK, WIDTH), f"{name}.up.weight": random_tensor(outputs, RANK)}


def converted(tensors: dict[str, torch.Tensor], scheme: str, folder: Path) -> dict[str, torch.Tensor]:
    save_file(tensors, folder / "given.safetensors")
    convert_adapter(open_adapter(folder / "given.safetensors"), KEY_SCHEMES[scheme], folder / "made.safetensors")
    return load_file(folder / "made.safetensors")


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("prefix", ["", "diffusion_model."])
def test_an_xlabs_lora_is_read_as_diffusers_reads_it(prefix: str, tmp_path: Path) -> None:
    tensors = {}
    for part in ("1", "2"):
        tensors |= lora_pair(f"{prefix}double_blocks.3.processor.qkv_lora{part}", 3 * WIDTH)
        tensors |= lora_pair(f"{prefix}double_blocks.3.processor.proj_lora{part}", WIDTH)
    tensors |= lora_pair(f"{prefix}single_blocks.4.processor.qkv_lora", 3 * WIDTH)
    tensors |= lora_pair(f"{prefix}single_blocks.4.processor.proj_lora", WIDTH)
    assert_equal(converted(tensors, "diffusers", tmp_path), _convert_xlabs_flux_lora_to_diffusers(dict(tensors)))
    (made,) = export_adapter(open_adapter(tmp_path / "given.safetensors"), "comfyui")
    assert len(load_file(made.path)) == made.tensors == 24


def test_attention_processors_of_old_diffusers_are_read(tmp_path: Path) -> None:
    block = "unet.down_blocks.1.attentions.0.transformer_blocks.0"
    tensors = {}
    for layer in ("attn1.processor.to_q_lora", "attn2.processor.to_k_lora", "attn1.processor.to_out_lora"):
        tensors |= lora_pair(f"{block}.{layer}", WIDTH)
    found = converted(tensors, "diffusers", tmp_path)
    plain = {key.replace(".processor", ""): value for key, value in tensors.items()}
    renamed = {key.replace("lora.down", "lora_A").replace("lora.up", "lora_B"): value for key, value in
               convert_unet_state_dict_to_peft(plain).items()}  # fmt: skip
    assert_equal(found, renamed)
    assert f"{block}.attn1.to_out.0.lora_A.weight" in found


def test_the_doubled_underscore_of_wan_fun_is_read_and_written(tmp_path: Path) -> None:
    layer = "lora_unet__blocks_0_self_attn_q"
    tensors = {
        f"{layer}.lora_down.weight": random_tensor(RANK, WIDTH),
        f"{layer}.lora_up.weight": random_tensor(WIDTH, RANK),
        f"{layer}.alpha": torch.tensor(float(RANK)),
    }
    found = converted(tensors, "diffusers", tmp_path)
    assert set(found) == {f"transformer.blocks.0.attn1.to_q.lora_{half}.weight" for half in "AB"}
    save_file(found, tmp_path / "back.safetensors")
    back = open_adapter(tmp_path / "back.safetensors")
    convert_adapter(back, KEY_SCHEMES["wan-fun"], tmp_path / "again.safetensors")
    assert_equal(load_file(tmp_path / "again.safetensors"), tensors)


@pytest.mark.parametrize(
    ("width", "blocks", "family"), [(2432, 38, "sd3.5"), (1536, 24, "sd3.5"), (3072, 60, "qwen-image")]
)
def test_the_size_of_a_published_model_decides_between_families_with_equal_names(
    width: int, blocks: int, family: str, tmp_path: Path
) -> None:
    layer = f"transformer.transformer_blocks.{blocks - 1}.attn.to_q"
    pair = {f"{layer}.lora_A.weight": torch.zeros(1, width), f"{layer}.lora_B.weight": torch.zeros(width, 1)}
    save_file(pair, tmp_path / "a.safetensors")
    assert open_adapter(tmp_path / "a.safetensors").family == family
    (made,) = export_adapter(open_adapter(tmp_path / "a.safetensors"), "comfyui")
    assert made.tensors == 2
