"""A merged folder loads in diffusers and computes what the base with the adapter computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file, save_file

from supertuner.config.settings.model import AdapterSettings
from supertuner.core.errors import ModelError
from supertuner.models.adapters.attach import attach, export_tensors, load_trainable_state, trainable_state
from supertuner.models.adapters.merge import _merge_with_lycoris, merged_weight
from supertuner.models.families.tiny_pipelines import build_pipeline
from supertuner.models.families.wan22.family import tiny_wan_pipeline
from supertuner.train.export.adapter_files import open_adapter, with_expert
from supertuner.train.export.adapter_merge import merge_adapters
from tests.models.adapters.modules import random_tensor, wan_output

TARGETS = ("to_q", "ffn.net.2", "patch_embedding")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "wan"
    build_pipeline(tiny_wan_pipeline, seed=3).save_pretrained(folder)
    return folder


def adapter(folder: Path, expert: str, settings: AdapterSettings) -> tuple[Path, torch.Tensor]:
    """(the adapter file of one expert as the trainer exports it, the output of the expert with that adapter)."""
    part = {"high_noise": "transformer", "low_noise": "transformer_2"}[expert]
    trained = attach(getattr(build_pipeline(tiny_wan_pipeline, seed=3), part), settings, TARGETS, seed=1, name=expert)
    load_trainable_state(
        trained,
        {name: tensor + 0.1 * random_tensor(*tensor.shape) for name, tensor in trainable_state(trained).items()},
    )
    tensors, metadata = export_tensors(trained, "transformer", settings)
    file = folder / f"x_{expert}.safetensors"
    save_file(tensors, file, metadata)
    return file, wan_output(trained.module).detach()


@pytest.mark.parametrize(
    "settings",
    [
        AdapterSettings(rank=4, alpha=3.0),
        AdapterSettings(rank=4, dora=True),
        AdapterSettings(type="lokr", rank=2),
        AdapterSettings(type="loha", rank=2),
        AdapterSettings(type="diff"),
    ],
    ids=["lora", "dora", "lokr", "loha", "diff"],
)
def test_a_merged_folder_computes_what_the_adapters_compute(
    base: Path, settings: AdapterSettings, tmp_path: Path
) -> None:
    wanted, files = {}, []
    for expert in ("high_noise", "low_noise"):
        file, wanted[expert] = adapter(tmp_path, expert, settings)
        files.append(with_expert(open_adapter(file), None))
    counts = merge_adapters(files, base, tmp_path / "merged")
    assert counts.keys() == {"transformer", "transformer_2"} and min(counts.values()) > 3
    loaded = WanPipeline.from_pretrained(tmp_path / "merged")
    bare = WanPipeline.from_pretrained(base)
    for expert, part in (("high_noise", "transformer"), ("low_noise", "transformer_2")):
        change = float((wan_output(getattr(bare, part)).detach() - wanted[expert]).abs().max())
        assert change > 1e-3
        assert (wan_output(getattr(loaded, part)) - wanted[expert]).abs().max() < 1e-4 * max(1.0, change)
    assert sorted(one.name for one in tmp_path.iterdir() if one.name.startswith(".")) == []


def test_the_adapter_of_one_expert_leaves_the_other_unchanged(base: Path, tmp_path: Path) -> None:
    file, _ = adapter(tmp_path, "low_noise", AdapterSettings(rank=2))
    counts = merge_adapters([with_expert(open_adapter(file), None)], base, tmp_path / "merged")
    assert counts["transformer"] == 0 < counts["transformer_2"]
    name = "diffusion_pytorch_model.safetensors"
    assert (tmp_path / "merged" / "transformer" / name).read_bytes() == (base / "transformer" / name).read_bytes()
    assert (tmp_path / "merged" / "transformer_2" / name).read_bytes() != (base / "transformer_2" / name).read_bytes()


def test_half_the_strength_is_half_the_change() -> None:
    tensors = {
        "lora_up.weight": random_tensor(6, 2),
        "lora_down.weight": random_tensor(2, 5),
        "alpha": torch.tensor(1.0),
    }
    weight = random_tensor(6, 5)
    whole = merged_weight(weight, tensors, "x") - weight
    assert torch.allclose(whole, 0.5 * tensors["lora_up.weight"] @ tensors["lora_down.weight"], atol=1e-6)
    assert torch.allclose(merged_weight(weight, tensors, "x", 0.5) - weight, whole / 2, atol=1e-6)


def test_an_adapter_that_does_not_fit_is_refused_and_nothing_is_written(base: Path, tmp_path: Path) -> None:
    file, _ = adapter(tmp_path, "low_noise", AdapterSettings(rank=2))
    opened = with_expert(open_adapter(file), None)
    with pytest.raises(ModelError, match=r"no model_index\.json"):
        merge_adapters([opened], tmp_path, tmp_path / "out")
    with pytest.raises(ModelError, match="both for transformer_2"):
        merge_adapters([opened, opened], base, tmp_path / "out")
    (tmp_path / "there").mkdir()
    with pytest.raises(ModelError, match="exists; name a new folder"):
        merge_adapters([opened], base, tmp_path / "there")
    key = "transformer.blocks.7.attn1.to_q.lora_{}.weight"
    save_file(
        {key.format("A"): random_tensor(2, 24), key.format("B"): random_tensor(24, 2)},
        tmp_path / "y_low_noise.safetensors",
    )
    other = with_expert(open_adapter(tmp_path / "y_low_noise.safetensors"), None)
    with pytest.raises(ModelError, match="another model"):
        merge_adapters([other], base, tmp_path / "out")
    with pytest.raises(ModelError, match="set `expert` to"):
        merge_adapters([open_adapter(tmp_path / "y_low_noise.safetensors")], base, tmp_path / "out")
    key = "transformer.blocks.0.attn1.to_q.lora_{}.weight"
    save_file(
        {key.format("A"): random_tensor(2, 9), key.format("B"): random_tensor(24, 2)},
        tmp_path / "z_low_noise.safetensors",
    )
    with pytest.raises(ModelError, match="does not fit"):
        merge_adapters([with_expert(open_adapter(tmp_path / "z_low_noise.safetensors"), None)], base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_non_finite_values_another_family_and_missing_tensors_are_refused(base: Path, tmp_path: Path) -> None:
    file, _ = adapter(tmp_path, "high_noise", AdapterSettings(rank=4))
    tensors = load_file(file)
    broken = {key: tensor.clone() for key, tensor in tensors.items()}
    key = "transformer.blocks.0.attn1.to_q.lora_B.weight"
    broken[key][0, 0] = float("nan")
    half = {name: tensor for name, tensor in tensors.items() if name != key}
    flux = {f"transformer.single_transformer_blocks.0.attn.to_q.lora_{one}.weight": torch.ones(2, 2) for one in "AB"}
    reasons = {
        r"broken_high_noise\.safetensors .*blocks\.0\.attn1\.to_q\.lora_up\.weight contains NaN": broken,
        r"half_high_noise\.safetensors .*blocks\.0\.attn1\.to_q.*": half,
        r"flux_high_noise\.safetensors is an adapter of flux, but .* several experts": flux,
    }
    for reason, tensors in reasons.items():
        path = tmp_path / f"{reason.partition('_')[0]}_high_noise.safetensors"
        save_file(tensors, path)
        with pytest.raises(ModelError, match=reason):
            merge_adapters([with_expert(open_adapter(path), None)], base, tmp_path / "merged")
    for strength in (0.0, float("nan"), float("inf")):
        with pytest.raises(ModelError, match=r"strength is "):
            merge_adapters([with_expert(open_adapter(file), None)], base, tmp_path / "merged", strength)
    assert not (tmp_path / "merged").exists()


def test_a_change_of_a_bias_is_merged_and_is_refused_for_a_layer_without_bias(base: Path, tmp_path: Path) -> None:
    key, name = "transformer.{}.diff_b", "diffusion_pytorch_model.safetensors"
    save_file({key.format("blocks.0.attn1.to_q"): torch.ones(24)}, tmp_path / "a_low_noise.safetensors")
    merge_adapters([with_expert(open_adapter(tmp_path / "a_low_noise.safetensors"), None)], base, tmp_path / "merged")
    before, after = (load_file(folder / "transformer_2" / name) for folder in (base, tmp_path / "merged"))
    changed = [one for one in before if not torch.equal(before[one], after[one])]
    assert changed == ["blocks.0.attn1.to_q.bias"]
    save_file(
        {f"transformer.blocks.0.attn1.norm_q.{one}_norm": torch.ones(24) for one in "wb"},
        tmp_path / "b_low_noise.safetensors",
    )
    with pytest.raises(ModelError, match="changes the bias of 1 layers that have none"):
        merge_adapters([with_expert(open_adapter(tmp_path / "b_low_noise.safetensors"), None)], base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_merged_weights_equal_those_of_lycoris_lora() -> None:
    """alpha equals the rank, because lycoris-lora scales its LoHa twice otherwise."""
    kinds = {
        "lora": {"lora_up.weight": random_tensor(16, 2), "lora_down.weight": random_tensor(2, 12)},
        "dora": {
            "lora_up.weight": random_tensor(16, 2),
            "lora_down.weight": random_tensor(2, 12),
            "dora_scale": random_tensor(16, 1),
        },
        "loha": {
            **{f"hada_w{one}_a": random_tensor(16, 2) + one for one in (1, 2)},
            **{f"hada_w{one}_b": random_tensor(2, 12) + one for one in (1, 2)},
        },
        "lokr": {"lokr_w1": random_tensor(2, 2), "lokr_w2_a": random_tensor(8, 2), "lokr_w2_b": random_tensor(2, 6)},
    }
    for kind, tensors in kinds.items():
        scaled = {**tensors, "alpha": torch.tensor(2.0)}
        weight = random_tensor(16, 12) + 1
        theirs = _merge_with_lycoris(weight, scaled, kind, 1.0)
        assert (merged_weight(weight, scaled, kind) - theirs).abs().max() < 1e-5, kind
        assert (theirs - weight).abs().max() > 0.1


def test_alpha_scales_a_loha_once() -> None:
    matrices = {
        f"hada_w{one}_{side}": random_tensor(*size) for one in (1, 2) for side, size in (("a", (6, 2)), ("b", (2, 5)))
    }
    whole = merged_weight(torch.zeros(6, 5), {**matrices, "alpha": torch.tensor(2.0)}, "x")
    half = merged_weight(torch.zeros(6, 5), {**matrices, "alpha": torch.tensor(1.0)}, "x")
    assert torch.allclose(half, whole / 2) and whole.abs().max() > 0.1
