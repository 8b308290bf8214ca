"""docs/gh200-to-comfyui.md: every `supertuner` command of the page runs as typed, on a tiny model."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

from safetensors import safe_open

from tests.train.runs import ROOT, TrainingForkServer

PAGE = (ROOT / "docs/gh200-to-comfyui.md").read_text()
SMALL = (
    *("model.path=tiny", "train.num_epochs=null", "train.max_steps=2", "train.gradient_accumulation_steps=1"),
    "datasets[0].resolution=64",
    *("cache_config.cache_dir=cache", "validation.every_steps=2", "validation.inference_steps=2"),
    *("validation.width=64", "validation.height=64"),
)
"""Appended to commands with the page's configuration: the test has neither the model nor the time."""
ON_A_TINY_MODEL = ("--model", "tiny", "--machine", "gh200-96", "--set", "datasets[0].resolution=64")
"""Appended to `supertuner init`: the test's machine has no GPU."""


def commands() -> list[list[str]]:
    """The commands of the page that SuperTuner runs, in order."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    found = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [words for words in found if words and words[0] == "supertuner"]


def test_the_commands_lead_from_pictures_to_two_files_for_comfyui(parent: TrainingForkServer, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples/example_images", tmp_path / "subject")
    given = commands()
    assert {tuple(words[:2]) for words in given} >= {("supertuner", "doctor"), ("supertuner", "train")}
    for words in given:
        small = [word for one in SMALL for word in ("--set", one)] if "my.yaml" in words else []
        words = [word.replace("~", str(tmp_path)) for word in words]
        more = ON_A_TINY_MODEL if words[1] == "init" else small
        assert parent.wait(parent.begin(*words[1:], *more, cwd=tmp_path)) == 0, (words, parent.output())
    assert (tmp_path / "sheet.png").is_file() and (tmp_path / "runs/subject-wan2.2-try/exports").is_dir()
    written = sorted((tmp_path / "runs/subject-wan2.2/exports/comfyui").glob("*.safetensors"))
    assert [re.sub(r"^.*?_", "", file.name) for file in written] == [
        *("high_noise.comfyui.safetensors", "low_noise.comfyui.safetensors")
    ]
    for file in written:
        with safe_open(file, framework="np") as tensors:
            assert all(name.startswith("diffusion_model.") for name in tensors.keys())  # noqa: SIM118  # it is no dict
