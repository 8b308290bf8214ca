"""The commands of `supertuner adapter`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from supertuner.cli import app, main
from supertuner.models.adapters.keys_schemes import KEY_SCHEMES
from supertuner.train.export.adapter_files import open_adapter
from supertuner.train.export.adapter_inspect import inspect_adapter
from tests.models.adapters.modules import random_tensor
from tests.train.export.test_adapter_files import wan_lora


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["adapter", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["adapter", *map(str, arguments)])
    assert stopped.value.code == 1
    output = capsys.readouterr().err
    assert "Traceback" not in output
    return output


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(
        wan_lora(KEY_SCHEMES["kohya"], 2.0, torch.bfloat16),
        tmp_path / "cat_low_noise.safetensors",
        {"modelspec.architecture": "wan2.2-t2v-14b/lora", "ss_learning_rate": "1e-4"},
    )
    return tmp_path / "cat_low_noise.safetensors"


def test_inspect_shows_scheme_expert_ranks_norms_and_metadata(file: Path) -> None:
    output = run("inspect", file)
    for part in (
        *("kohya", "wan2.2", "low_noise", "lora (3)", "rank 4 (3)", "scale 0.5 (3)", "9 of 9 matched", "norm "),
        *("wan2.2-t2v-14b/lora", "ss_learning_rate: 1e-4", "reads these names", "BF16"),
    ):
        assert part in output, part
    found = json.loads(run("inspect", file, "--json"))
    assert found["ranks"] == {"4": 3} and found["experts"] == ["low_noise"] and found["unknown"] == {}
    tensors = load_file(file)
    layer = "lora_unet_blocks_0_self_attn_q"
    change = 0.5 * tensors[f"{layer}.lora_up.weight"].double() @ tensors[f"{layer}.lora_down.weight"].double()
    assert inspect_adapter(open_adapter(file)).norms["blocks.0.attn1.to_q"] == pytest.approx(float(change.norm()))


@pytest.mark.parametrize("kind", ["lokr", "lokr of full matrices", "loha", "diff"])
def test_the_norm_of_a_lycoris_adapter_is_that_of_the_merged_change(kind: str, tmp_path: Path) -> None:
    from supertuner.models.adapters.merge import merged_weight

    tensors = {
        "lokr": {
            "lokr_w1": random_tensor(2, 2),
            "lokr_w2_a": random_tensor(6, 3),
            "lokr_w2_b": random_tensor(3, 4),
            "alpha": torch.tensor(1.0),
        },
        "lokr of full matrices": {
            "lokr_w1": random_tensor(2, 2),
            "lokr_w2": random_tensor(6, 4),
            "alpha": torch.tensor(1.0),
        },
        "loha": {
            "hada_w1_a": random_tensor(12, 3),
            "hada_w1_b": random_tensor(3, 8),
            "hada_w2_a": random_tensor(12, 3),
            "hada_w2_b": random_tensor(3, 8),
            "alpha": torch.tensor(2.0),
        },
        "diff": {"diff": random_tensor(12, 8)},
    }[kind]
    save_file(
        {f"lycoris_blocks_0_attn1_to_q.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "a.safetensors"
    )
    change = merged_weight(torch.zeros(12, 8), tensors, "x")
    norms = inspect_adapter(open_adapter(tmp_path / "a.safetensors")).norms
    assert norms["blocks.0.attn1.to_q"] == pytest.approx(float(change.norm()), rel=1e-5)


def test_non_finite_values_are_reported_with_exit_code_1(tmp_path: Path) -> None:
    tensors = wan_lora(KEY_SCHEMES["diffusers"], None)
    tensors["transformer.blocks.0.attn1.to_q.lora_B.weight"][0, 0] = float("inf")
    save_file(tensors, tmp_path / "a.safetensors")
    result = CliRunner().invoke(app, ["adapter", "inspect", str(tmp_path / "a.safetensors")])
    assert result.exit_code == 1 and "transformer.blocks.0.attn1.to_q.lora_B.weight" in result.output


def test_a_dora_for_comfyui_needs_its_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = wan_lora(KEY_SCHEMES["diffusers"], None)
    tensors["transformer.blocks.0.attn1.to_q.lora_magnitude_vector"] = random_tensor(24)
    save_file(tensors, tmp_path / "dora_low_noise.safetensors")
    command = ("export", tmp_path / "dora_low_noise.safetensors", "--for", "comfyui")
    assert "set --base to the folder of its pipeline" in refused(capsys, *command)
    assert "is not the folder of a diffusers pipeline" in refused(capsys, *command, "--base", tmp_path)


def test_a_file_can_be_converted_to_comfyui_to_diffusers_and_back(file: Path) -> None:
    assert "6 tensors for comfyui" in run("export", file, "--for", "comfyui")
    comfyui = file.with_name("cat_low_noise.comfyui.safetensors")
    assert "diffusion_model.blocks.0.self_attn.q.lora_A.weight" in load_file(comfyui)
    run("export", comfyui, "--for", "diffusers", "--out", file.with_name("d.safetensors"))
    run("convert", file.with_name("d.safetensors"), "--to", "lycoris-stages", "--out", file.with_name("e.safetensors"))
    assert "lycoris_transformer_2_blocks_0_attn1_to_q.lora_up.weight" in load_file(file.with_name("e.safetensors"))
    output = run("convert", file.with_name("e.safetensors"), "--to", "diffusers-pair")
    assert "9 of 9 keys matched" in output
    assert json.loads(run("inspect", file.with_name("e.diffusers-pair.safetensors"), "--json"))["experts"] == [
        "low_noise"
    ]


def test_a_file_with_both_experts_is_exported_as_two_files(tmp_path: Path) -> None:
    save_file(wan_lora(KEY_SCHEMES["ai-toolkit"], None), tmp_path / "x.safetensors")
    run("export", tmp_path / "x.safetensors", "--for", "comfyui")
    assert {path.name for path in tmp_path.iterdir()} == {
        "x.safetensors",
        "x_high_noise.comfyui.safetensors",
        "x_low_noise.comfyui.safetensors",
    }


@pytest.mark.parametrize("force", [False, True])
def test_an_export_that_was_killed_between_its_two_files_is_detected_and_can_be_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], force: bool
) -> None:
    source, out = tmp_path / "x.safetensors", tmp_path / "out"
    out.mkdir()
    save_file(wan_lora(KEY_SCHEMES["ai-toolkit"], None), source)
    arguments = ("export", source, "--for", "comfyui", "--out", out / "y.safetensors", *(["--force"] if force else []))
    if force:
        run(*arguments)
    killed = f"""
import os, signal
from supertuner.cli import main
from supertuner.train.export import adapter_files
publish_file = adapter_files.publish_file
def publish_and_die(*arguments):
    publish_file(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
adapter_files.publish_file = publish_and_die
main({["adapter", *map(str, arguments)]!r})
"""
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -signal.SIGKILL
    assert len(list(out.glob("y*"))) == 1, "files of two exports are never mixed"
    output = refused(capsys, *arguments[:6])
    assert (
        "y_high_noise.safetensors exists and " in output
        and "interrupted" in output
        and "replace both with --force" in output
    )
    run(*arguments[:6], "--force")
    assert {path.name for path in out.iterdir()} == {"y_high_noise.safetensors", "y_low_noise.safetensors"}


def test_paths_that_cannot_be_written_are_refused_with_a_remedy(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = file.parent / "nowhere" / "a.safetensors"
    for verb in (("convert", file, "--to", "original"), ("export", file, "--for", "comfyui")):
        assert "nowhere; create it, or name another file" in refused(capsys, *verb, "--out", nowhere)
    assert f"{file.parent} is a folder" in refused(
        capsys, "convert", file, "--to", "original", "--out", file.parent, "--force"
    )
    assert list(file.parent.iterdir()) == [file]


def test_unknown_keys_stop_a_conversion_without_partial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = {"lora_unet_blocks_0_mystery.lora_down.weight": random_tensor(2)}
    save_file(wan_lora(KEY_SCHEMES["kohya"], None) | unknown, tmp_path / "a.safetensors")
    output = refused(capsys, "convert", tmp_path / "a.safetensors", "--to", "original")
    assert "6 of 7 keys matched" in output and "lora_unet_blocks_0_mystery" in output and "set --partial" in output
    assert "6 of 7 keys matched" in run("convert", tmp_path / "a.safetensors", "--to", "original", "--partial")


def test_invalid_options_are_refused_with_the_valid_values(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "known schemes: diffusers" in refused(capsys, "convert", file, "--to", "nonsense")
    assert "choose from diffusers, comfyui" in refused(capsys, "export", file, "--for", "nonsense")
    assert "known experts: high_noise" in refused(capsys, "convert", file, "--to", "original", "--expert", "both")
    assert "wan2.2, flux" in refused(capsys, "inspect", file, "--family", "sd1")
    assert "none of 9 keys" in refused(capsys, "inspect", file, "--family", "flux")
    lokr = file.with_name("l.safetensors")
    save_file({"lycoris_blocks_0_attn1_to_q.lokr_w1": random_tensor(2, 2)}, lokr)
    assert "diffusers loads only LoRA; merge it" in refused(capsys, "export", lokr, "--for", "diffusers")


def test_every_scheme_is_listed_with_an_example_key() -> None:
    output = run("schemes")
    assert all(name in output for name in KEY_SCHEMES) and "transformer_2.blocks.0.attn1.to_q.lora_A.weight" in output
