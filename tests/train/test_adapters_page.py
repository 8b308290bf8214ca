"""docs/adapters.md as a new user follows it: its commands and its Python run as printed, and its promises hold."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.runs import ROOT, TrainingForkServer, artefacts, exported_file

PAGE = (ROOT / "docs/adapters.md").read_text()
STOPPED = "Ctrl-C"
"""In the comment of a command that the page has the reader stop."""


def walk() -> str:
    """The section whose commands are run."""
    return PAGE.split("\n## From training to ComfyUI and back\n")[1].split("\n## ")[0]


def commands() -> list[tuple[list[str], str]]:
    """Every command in the order of the page: its arguments, and its comment."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", walk(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                found.append((words, line.partition("#")[2]))
    return found


@pytest.fixture(scope="module")
def folder(parent: TrainingForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which all commands of the page were run, one after the other."""
    made = tmp_path_factory.mktemp("page")
    shutil.copytree(ROOT / "examples", made / "examples", ignore=shutil.ignore_patterns("cache"))
    assert any(STOPPED in comment for _, comment in commands())
    for words, comment in commands():
        assert words[0] == "supertuner", words
        pid = parent.begin(*words[1:], cwd=made)
        stopped = STOPPED in comment
        if stopped:
            _interrupt(pid, made / "runs/first/losses.jsonl")
        assert parent.wait(pid) == (128 + signal.SIGINT if stopped else 0), (words, parent.output())
    yield made


def _interrupt(pid: int, losses: Path) -> None:
    """Press Ctrl-C after some steps."""
    deadline = time.monotonic() + 60
    while not (losses.is_file() and losses.read_bytes().count(b"\n") >= 5):
        assert time.monotonic() < deadline, "nothing was trained"
        time.sleep(0.005)
    os.kill(pid, signal.SIGINT)


def same(one: Path, other: Path) -> bool:
    given, found = load_file(one), load_file(other)
    return given.keys() == found.keys() and all(torch.equal(given[key], found[key]) for key in given)


def test_a_stopped_and_resumed_run_ends_like_an_uninterrupted_one(parent: TrainingForkServer, folder: Path) -> None:
    again = parent.begin("train", "examples/wan22_automagic.yaml", "--set", "run.output_dir=twin", cwd=folder)
    assert parent.wait(again) == 0, parent.output()
    whole, resumed = artefacts(folder / "twin/first"), artefacts(folder / "runs/first")
    kept = {name for name in resumed if name in whole}
    assert {name.partition("/")[0] for name in kept} == {
        *("losses.jsonl", "validation.jsonl", "exports", "checkpoints", "samples")
    }
    assert [name for name in sorted(kept) if whole[name] != resumed[name]] == []


def test_a_file_converted_to_comfyui_and_back_is_unchanged(folder: Path) -> None:
    assert same(folder / "runs/back_high_noise.safetensors", exported_file(folder / "runs/first", "high_noise"))
    assert same(folder / "runs/back_low_noise.safetensors", exported_file(folder / "runs/kron", "low_noise"))


def test_the_python_of_the_page_loads_both_experts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (code,) = re.findall(r"```python\n(.*?)```", walk(), re.DOTALL)
    known: dict[str, object] = {}
    exec(compile(code, "docs/adapters.md", "exec"), known)
    pipe = known["pipe"]
    for part, expert in (("transformer", "high_noise"), ("transformer_2", "low_noise")):
        module = getattr(pipe, part)
        given = load_file(exported_file(folder / "runs/first", expert))
        loaded = dict(module.named_parameters())
        for key, tensor in given.items():
            name = key.removeprefix("transformer.").replace(".weight", ".first.weight")
            assert torch.equal(loaded[name], tensor), key


def test_an_earlier_checkpoint_is_exported_and_its_parts_are_refused_as_adapter_files(
    parent: TrainingForkServer, folder: Path
) -> None:
    """If the run has another alpha than the rank, a part without it would have twice or half the effect."""
    checkpoint = folder / "runs/first/checkpoints/step-00000016"
    part = "adapter.low_noise.safetensors"
    made = load_file(folder / "runs/first/exports/step-00000016/first-step00000016_low_noise.safetensors")
    assert {key.removeprefix("transformer."): value.tolist() for key, value in made.items()} == {
        key: value.tolist() for key, value in load_file(checkpoint / part).items()
    }, "alpha is the rank here"
    assert (folder / "runs/first/exports/comfyui/first-step00000016_low_noise.comfyui.safetensors").is_file()
    sets = ("--set", "run.name=from-part", "--set", f"adapter.low_noise.start_from={checkpoint / part}")
    for words in (
        ("adapter", "export", str(checkpoint / part), "--for", "comfyui"),
        ("train", "examples/wan22_automagic.yaml", *sets),
    ):
        assert parent.wait(parent.begin(*words, cwd=folder)) == 1
        assert f"{part} is a part of a checkpoint and does not contain its alpha" in parent.output()
    assert parent.wait(parent.begin("adapter", "inspect", str(checkpoint / part), cwd=folder)) == 0


def test_both_experts_of_the_merged_model_differ_from_the_base_and_it_trains(
    parent: TrainingForkServer, folder: Path
) -> None:
    for part in ("transformer", "transformer_2"):
        base, merged = (
            load_file(next((folder / where / part).glob("*.safetensors")))
            for where in ("runs/kron/tiny-wan2.2", "runs/merged")
        )
        changed = {name for name in base if not torch.equal(base[name], merged[name])}
        assert changed and all(".attn" in name for name in changed)
    sets = ("--set", "run.name=on-merged", "--set", "model.path=runs/merged", "--set", "train.max_steps=1")
    pid = parent.begin("train", "examples/wan22_automagic.yaml", *sets, cwd=folder)
    assert parent.wait(pid) == 0, parent.output()


def test_runs_that_start_from_files_report_them(folder: Path) -> None:
    for run, message in (
        ("second", "16 of 16 layers start from the values of"),
        ("above", "is merged into the frozen weights of"),
    ):
        events = (folder / "runs" / run / "events.jsonl").read_text()
        assert events.count(message) == 2, run
    assert not same(
        *(exported_file(folder / "runs" / name, "high_noise") for name in ("second", "first")),
    )


REAL = ("captioned_images", "qwen_image_pictures", "sd35_pictures", "sdxl_pictures")
SMALL = (
    *("model.path=tiny", "model.variant=null", "model.base_weights=as_computed", "train.max_steps=1"),
    *(
        "datasets[0].instance_data_dir=examples/example_images",
        "datasets[0].resolution=64",
        "datasets[0].bucket_step=16",
    ),
    *("cache_config.cache_dir=cache", "validation.width=64", "validation.height=64", "validation.inference_steps=2"),
)


@pytest.mark.parametrize("name", REAL)
def test_the_configurations_for_real_models_train_the_tiny_one(
    parent: TrainingForkServer, folder: Path, name: str
) -> None:
    assert name in walk()
    sets = [word for one in SMALL for word in ("--set", one)]
    pid = parent.begin("train", f"examples/{name}.yaml", *sets, cwd=folder)
    assert parent.wait(pid) == 0, parent.output()
