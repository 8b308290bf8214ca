"""Loading of damaged, incomplete and foreign pipelines, and of weights from single files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from supertuner.core.errors import ModelError
from supertuner.models import loading
from supertuner.models.family_loader import load_family
from supertuner.models.spec import ModelDescription, ModelSource

CPU = torch.device("cpu")
WAN = load_family("wan2.2")
HIGH = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tiny_wan: ModelSource, tmp_path: Path) -> Path:
    """A copy of a pipeline that a test may damage."""
    return Path(shutil.copytree(tiny_wan.path, tmp_path / "pipeline"))


def error_message(action: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as caught:
        action()
    return str(caught.value)


def read(path: Path | str) -> ModelDescription:
    return WAN.read_model(ModelSource(str(path)))


def high(model: ModelDescription, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return WAN.load_denoiser(model, model.experts[0], dtype)


def edit(file: Path, **changed: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


@pytest.mark.parametrize("path", ["/no/such/folder", "./missing", "~/missing-model", "a/b/c"])
def test_a_missing_folder_raises_an_error_with_its_name(path: str) -> None:
    assert error_message(lambda: read(path)) == f"model.path is {path!r}: there is no such folder"


def test_a_file_as_model_path_raises_an_error_that_names_single_file(folder: Path) -> None:
    assert "model.single_file" in error_message(lambda: read(folder / HIGH))


def test_a_folder_without_an_index_raises_an_error_that_says_what_it_is(folder: Path, tmp_path: Path) -> None:
    assert "not the folder of a diffusers pipeline" in error_message(lambda: read(tmp_path))
    assert "use the folder above" in error_message(lambda: read(folder / "vae"))
    (tmp_path / "high_noise_model").mkdir()
    assert "-Diffusers" in error_message(lambda: read(tmp_path))


def test_a_pipeline_of_another_family_raises_an_error_with_that_family(folder: Path, tiny_flux: ModelSource) -> None:
    message = error_message(lambda: WAN.read_model(tiny_flux))
    assert "is a FluxPipeline" in message and 'set model.family to "flux"' in message
    assert 'set model.family to "wan2.2"' in error_message(
        lambda: load_family("flux").read_model(ModelSource(str(folder)))
    )


def test_an_unsupported_pipeline_raises_an_error_with_the_supported_ones(folder: Path) -> None:
    edit(folder / "model_index.json", _class_name="StableDiffusionPipeline")
    message = error_message(lambda: read(folder))
    assert "is a StableDiffusionPipeline" in message and "wan2.2 takes WanPipeline, WanImageToVideoPipeline" in message


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_an_index_that_is_not_a_json_object_raises_an_error(folder: Path, content: bytes) -> None:
    (folder / "model_index.json").write_bytes(content)
    assert "model_index.json" in error_message(lambda: read(folder))


def test_a_missing_component_raises_an_error_with_its_name(folder: Path) -> None:
    shutil.rmtree(folder / "transformer_2")
    assert f"{folder / 'transformer_2'} is missing" in error_message(lambda: read(folder))
    edit(folder / "model_index.json", transformer_2=[None, None])
    assert "names no transformer_2" in error_message(lambda: read(folder))


def test_classes_of_other_libraries_are_not_imported(folder: Path) -> None:
    edit(folder / "model_index.json", transformer=["antigravity", "Fly"])
    assert "is a class of antigravity, which is not loaded" in error_message(lambda: high(read(folder)))
    edit(folder / "model_index.json", transformer=["diffusers", "NoSuchThing"])
    assert "installed diffusers has no" in error_message(lambda: high(read(folder)))


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_weights_raise_an_error(folder: Path, keep: float) -> None:
    content = (folder / HIGH).read_bytes()
    count = int(len(content) * keep) if isinstance(keep, float) else keep % len(content)
    (folder / HIGH).write_bytes(content[:count])
    message = error_message(lambda: high(read(folder)))
    assert str(folder / HIGH) in message and "is damaged" in message and "download it again" in message


def test_weights_without_a_tensor_raise_an_error(folder: Path) -> None:
    tensors = load_file(folder / HIGH)
    del tensors["blocks.1.attn1.to_q.weight"]
    save_file(tensors, folder / HIGH, {"format": "pt"})
    assert "lacks 1 tensors that its config needs (blocks.1.attn1.to_q.weight)" in error_message(
        lambda: high(read(folder))
    )


def test_weights_of_another_size_than_in_the_config_raise_an_error(folder: Path) -> None:
    edit(folder / "transformer" / "config.json", ffn_dim=64)
    assert "cannot be loaded as WanTransformer3DModel" in error_message(lambda: high(read(folder)))


def test_a_text_encoder_without_a_tensor_raises_an_error(folder: Path) -> None:
    file = folder / "text_encoder" / "model.safetensors"
    tensors = load_file(file)
    del tensors["encoder.block.0.layer.0.SelfAttention.q.weight"]
    save_file(tensors, file, {"format": "pt"})
    assert "lacks 1 tensors" in error_message(lambda: WAN.build_text_encoder(read(folder), CPU, torch.float32))


def test_weight_files_that_can_run_code_are_not_opened(folder: Path) -> None:
    (folder / HIGH).rename((folder / HIGH).with_suffix(".bin"))
    message = error_message(lambda: high(read(folder)))
    assert "diffusion_pytorch_model.bin" in message and "only .safetensors" in message


def test_missing_weights_raise_an_error(folder: Path) -> None:
    (folder / HIGH).unlink()
    assert "no .safetensors file" in error_message(lambda: high(read(folder)))


def test_a_damaged_tokenizer_raises_an_error_with_its_folder(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    assert str(folder / "tokenizer") in error_message(lambda: WAN.build_text_encoder(read(folder), CPU, torch.float32))


def sharded(folder: Path) -> None:
    module = high(read(folder))
    shutil.rmtree(folder / "transformer")
    module.save_pretrained(folder / "transformer", max_shard_size="40KB")  # type: ignore[operator]


def test_sharded_weights_are_loaded_like_those_in_one_file(folder: Path) -> None:
    whole = high(read(folder)).state_dict()
    sharded(folder)
    files = list((folder / "transformer").glob("*-of-*.safetensors"))
    assert len(files) > 1
    again = high(read(folder)).state_dict()
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_missing_shard_raises_an_error_with_its_name(folder: Path) -> None:
    sharded(folder)
    lost = sorted((folder / "transformer").glob("*-of-*.safetensors"))[1]
    lost.unlink()
    message = error_message(lambda: high(read(folder)))
    assert lost.name in message and "missing" in message


def test_an_index_of_weights_cannot_name_files_outside_its_folder(folder: Path) -> None:
    sharded(folder)
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    listed = json.loads(file.read_text())
    listed["weight_map"] = dict.fromkeys(listed["weight_map"], "../../secret.safetensors")
    file.write_text(json.dumps(listed))
    assert "outside its folder" in error_message(lambda: high(read(folder)))


def test_a_variant_is_read_from_its_own_files_and_raises_an_error_if_missing(folder: Path) -> None:
    high(read(folder)).save_pretrained(folder / "transformer", variant="fp16")  # type: ignore[operator]
    model = WAN.read_model(ModelSource(str(folder), variant="fp16"))
    tensors = load_file(folder / HIGH)
    save_file({name: one * 0 for name, one in tensors.items()}, folder / HIGH, {"format": "pt"})
    assert high(model).get_parameter("proj_out.weight").any()
    message = error_message(lambda: WAN.build_media_encoder(model, CPU))
    assert "model.variant is 'fp16'" in message and "diffusion_pytorch_model.safetensors" in message


def test_modules_that_wan_keeps_in_fp32_are_fp32_in_a_bf16_model(folder: Path) -> None:
    module = high(read(folder), torch.bfloat16)
    assert module.get_parameter("blocks.0.attn1.to_q.weight").dtype == torch.bfloat16
    assert module.get_parameter("scale_shift_table").dtype == torch.float32
    assert module.get_parameter("condition_embedder.time_embedder.linear_1.weight").dtype == torch.float32


ORIGINAL = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "attn1": "self_attn",
    "attn2": "cross_attn",
    ".to_out.0.": ".o.",
    ".to_q.": ".q.",
    ".to_k.": ".k.",
    ".to_v.": ".v.",
    "proj_out": "head.head",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "norm2": "norm3",
}
"""Names in diffusers → names in Wan's original files."""


def original_name(name: str) -> str:
    if name == "scale_shift_table":
        return "head.modulation"
    for ours, theirs in ORIGINAL.items():
        name = name.replace(ours, theirs)
    return name.replace("scale_shift_table", "modulation")


@pytest.mark.parametrize("prefix", [None, "", "model.diffusion_model."])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_file_gives_the_same_module_as_the_folder(
    folder: Path, tmp_path: Path, prefix: str | None, dtype: torch.dtype
) -> None:
    """With the names of diffusers, and with Wan's original names, to which other programs add a prefix."""
    tensors = load_file(folder / HIGH)
    named = tensors if prefix is None else {prefix + original_name(name): one for name, one in tensors.items()}
    file = tmp_path / "high.safetensors"
    save_file(named, file)
    expected = high(read(folder), dtype)
    (folder / HIGH).unlink()
    model = replace(read(folder), source=ModelSource(str(folder), single_files={"transformer": file}))
    found = high(model, dtype)
    assert not found.training and not any(one.requires_grad for one in found.parameters())
    wanted = expected.state_dict()
    assert wanted.keys() == found.state_dict().keys()
    for name, one in found.state_dict().items():
        assert one.dtype == wanted[name].dtype and torch.equal(one, wanted[name]), name


def test_a_single_file_that_lacks_tensors_or_belongs_to_another_model_raises_an_error(
    folder: Path, tmp_path: Path
) -> None:
    tensors = load_file(folder / HIGH)
    file = tmp_path / "high.safetensors"
    source = ModelSource(str(folder), single_files={"transformer": file})
    save_file({name: one for name, one in tensors.items() if "blocks.1." not in name}, file)
    assert f"{file} lacks tensors" in error_message(lambda: high(WAN.read_model(source)))
    save_file({"something.else": torch.zeros(3)}, file)
    assert str(file) in error_message(lambda: high(WAN.read_model(source)))
    save_file({name: torch.zeros(*one.shape, 2) for name, one in tensors.items()}, file)
    assert f"{file} cannot be loaded" in error_message(lambda: high(WAN.read_model(source)))
    file.write_bytes(b"rubbish")
    assert f"{file} is damaged" in error_message(lambda: high(WAN.read_model(source)))
    file.unlink()
    assert f"{file}, for the weights of transformer, is not an existing .safetensors file" in error_message(
        lambda: WAN.read_model(source)
    )


def test_a_single_file_with_scaled_8_bit_weights_raises_an_error(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "scaled.safetensors"
    tensors = {name: one.to(torch.float8_e4m3fn) for name, one in load_file(folder / HIGH).items()}
    save_file(tensors | {"blocks.0.ffn.net.2.scale_weight": torch.ones(1)}, file)
    message = error_message(lambda: high(WAN.read_model(ModelSource(str(folder), single_files={"transformer": file}))))
    assert "8-bit weights with separate scales" in message and "scale_weight" in message and "bf16" in message


def test_a_quantized_component_without_its_library_raises_an_error_with_its_folder(folder: Path) -> None:
    quantised = {"quant_method": "bitsandbytes", "load_in_8bit": True, "_load_in_8bit": True}
    edit(folder / "transformer" / "config.json", quantization_config=quantised)
    assert str(folder / "transformer") in error_message(lambda: high(read(folder)))


def test_aligning_keeps_tied_weights_tied(tiny_wan: ModelSource) -> None:
    encoder = loading.load_module(WAN.read_model(tiny_wan), "text_encoder", torch.float32)
    shared = encoder.get_parameter("shared.weight")
    assert encoder.get_submodule("encoder.embed_tokens").weight is shared
    assert shared.data_ptr() % 64 == 0


@pytest.mark.parametrize("boundary", ["0.875", 0, 1, 1.5, True])
def test_a_boundary_outside_0_to_1_raises_an_error(folder: Path, boundary: object) -> None:
    edit(folder / "model_index.json", boundary_ratio=boundary)
    assert "boundary_ratio is" in error_message(lambda: read(folder))


def test_a_missing_shift_is_1_and_an_invalid_one_raises_an_error(folder: Path) -> None:
    scheduler = folder / "scheduler" / "scheduler_config.json"
    edit(scheduler, flow_shift=None)
    assert read(folder).shift == 1.0
    edit(scheduler, flow_shift="3")
    assert "flow_shift is '3', not a number above 0" in error_message(lambda: read(folder))


def test_an_invalid_config_raises_an_error_with_its_component(folder: Path) -> None:
    edit(folder / "transformer" / "config.json", num_attention_heads="x")
    assert "transformer cannot be loaded as WanTransformer3DModel" in error_message(lambda: high(read(folder)))
