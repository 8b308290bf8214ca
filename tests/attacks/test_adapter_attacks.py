"""Adapter files with tensors of any size: they are read, or raise ModelError; no other exception, no partial file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from supertuner.core.errors import ModelError
from supertuner.models.adapters.keys import split_tensor_name
from supertuner.models.adapters.keys_schemes import CANONICAL_TENSORS, KEY_SCHEMES, spell_tensor
from supertuner.models.adapters.merge import merged_weight
from supertuner.train.export.adapter_files import convert_adapter, load_adapter_tensors, open_adapter
from supertuner.train.export.adapter_inspect import inspect_adapter

SIZES = st.lists(st.integers(0, 4), max_size=5).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.float8_e4m3fn])
LAYERS = st.sampled_from(
    [
        "diffusion_model.blocks.0.self_attn.q",
        "diffusion_model.double_blocks.0.img_attn.qkv",
        "diffusion_model.single_blocks.0.linear1",
        "transformer.transformer_blocks.0.attn.to_q",
        "transformer.single_transformer_blocks.0.proj_mlp",
    ]
)
LIKELY = ("lora_A", "lora_B", "alpha", "dora_scale", "lokr_w1", "lokr_w2", "hada_w1_a", "hada_w1_b", "diff", "diff_b")


@st.composite
def files(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    layer, spelling = draw(LAYERS), draw(st.sampled_from(["peft", "kohya"]))
    names = draw(st.lists(st.sampled_from((*LIKELY, *CANONICAL_TENSORS)), min_size=1, max_size=6, unique=True))
    return {
        f"{layer}.{spell_tensor(name, spelling)}": torch.full(draw(SIZES), draw(st.sampled_from([0.0, 1.0]))).to(
            draw(DTYPES)
        )
        for name in names
    }


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(files(), st.sampled_from([name for name, scheme in KEY_SCHEMES.items() if not scheme.marks_experts]))
def test_tensors_of_any_size_are_converted_or_raise_an_error(tensors: dict[str, torch.Tensor], target: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "a.safetensors", Path(folder) / "b.safetensors"
        save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, source)
        try:
            opened = open_adapter(source)
            inspect_adapter(opened).to_dict()
            convert_adapter(opened, KEY_SCHEMES[target], out)
        except ModelError as error:
            assert str(error) and not out.exists()
        else:
            assert not open_adapter(out).reading.unknown
            assert load_adapter_tensors(opened, KEY_SCHEMES[target]).keys() == open_adapter(out).entries.keys()
        assert sorted(path.name for path in Path(folder).iterdir() if path.name.startswith(".")) == []


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(files(), SIZES)
@example({f"diffusion_model.blocks.0.self_attn.q.lokr_w{one}": torch.tensor(0.0) for one in (1, 2)}, ())
def test_tensors_of_any_size_are_merged_or_raise_an_error(
    tensors: dict[str, torch.Tensor], size: tuple[int, ...]
) -> None:
    found = {key: split_tensor_name(key) for key in tensors}
    named = {spell_tensor(one[1], "kohya"): tensors[key] for key, one in found.items() if one is not None}
    assert len(named) == len(tensors)
    weight = torch.zeros(size)
    try:
        assert merged_weight(weight, named, "layer").shape == weight.shape
    except ModelError as error:
        assert "layer" in str(error)
