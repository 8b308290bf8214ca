"""Adapter files that could be misread: half a LoRA, or layers that several families have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from supertuner.core.errors import ModelError
from supertuner.models.adapters.family_layers import FAMILY_LAYERS
from supertuner.models.adapters.keys import read_keys
from supertuner.models.adapters.keys_schemes import KEY_SCHEMES
from supertuner.train.export.adapter_export import export_adapter
from supertuner.train.export.adapter_files import convert_adapter, open_adapter
from tests.models.adapters.modules import random_tensor
from tests.train.export.test_adapter_files import RANK, wan_lora


@pytest.mark.parametrize("half", ["lora_down.weight", "lora_up.weight"])
def test_half_a_lora_is_refused_by_its_key(half: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = wan_lora(KEY_SCHEMES["kohya"], 2.0)
    lost = f"lora_unet_blocks_0_self_attn_q.{half}"
    save_file({key: tensor for key, tensor in tensors.items() if key != lost}, path)
    for scheme in ("diffusers", "original", "lycoris"):
        with pytest.raises(
            ModelError, match=r"a\.safetensors cannot be .* \(lora_unet_blocks_0_self_attn_q\..*\) but no"
        ):
            convert_adapter(open_adapter(path), KEY_SCHEMES[scheme], tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()


def test_metadata_decide_the_family_of_layers_that_families_share(tmp_path: Path) -> None:
    path, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    layer = "transformer.transformer_blocks.0.attn.to_q"
    tensors = {f"{layer}.lora_A.weight": random_tensor(RANK, 24), f"{layer}.lora_B.weight": random_tensor(24, RANK)}
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"a\.safetensors: the layers .* exist in flux and .* choose the family"):
        export_adapter(open_adapter(path), "comfyui", out)
    for family in ("qwen-image", "qwen-image-edit"):
        save_file(tensors, path, {"supertuner": json.dumps({"family": family})})
        assert open_adapter(path).reading.families == ("qwen-image",)
    assert [(made.path, made.tensors) for made in export_adapter(open_adapter(path), "comfyui", out)] == [(out, 2)]
    assert FAMILY_LAYERS["qwen-image"].comfyui_loads(read_keys(load_file(out)).scheme)
    save_file(tensors, path, {"supertuner": json.dumps({"family": "wan2.2"})})
    assert len(open_adapter(path).reading.families) > 1, "keys count before metadata"
