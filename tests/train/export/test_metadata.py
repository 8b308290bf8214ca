"""An exported file records how and from which model it was made, and nothing about the machine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from safetensors import safe_open
from typer.testing import CliRunner

from supertuner.arena.run_context import RunContext
from supertuner.cli import app
from supertuner.config.sources.load import load_config
from supertuner.train.export.adapter_files import open_adapter
from supertuner.train.export.export import RunExporter
from supertuner.train.setup import open_run
from tests.train.runs import config


def exported(tmp_path: Path) -> list[Path]:
    file = config(tmp_path, "a", adapter={"rank": 3, "alpha": 1.5}, optimizer={"learning_rate": 3e-4})
    folder = tmp_path / "a" / "run"
    folder.mkdir(parents=True)
    with open_run(load_config(file).config, RunContext.silent(folder)) as run:
        return RunExporter(run).finish()


def test_a_file_can_be_traced_to_its_run_and_reveals_nothing_about_the_machine(tmp_path: Path) -> None:
    made = exported(tmp_path)
    assert [path.name for path in made] == [
        f"run-step00000000_{expert}.safetensors" for expert in ("high_noise", "low_noise")
    ]
    for path, expert in zip(made, ("high_noise", "low_noise"), strict=True):
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata()
        content = path.read_bytes()
        data = content[8 + int.from_bytes(content[:8], "little") :]
        assert metadata["modelspec.sai_model_spec"] == "1.0.1"
        assert metadata["modelspec.architecture"] == "wan2.2/lora"
        assert metadata["modelspec.title"] == f"run, {expert}"
        assert metadata["modelspec.hash_sha256"] == f"0x{hashlib.sha256(data).hexdigest()}"
        own = json.loads(metadata["supertuner"])
        assert own["expert"] == expert and own["rank"] == 3 and own["alpha"] == 1.5
        assert own["run"] == "run" and own["step"] == 0 and own["family"] == "wan2.2"
        assert own["settings"]["optimizer"]["learning_rate"] == 3e-4
        assert own["versions"].keys() >= {"supertuner", "torch", "peft", "diffusers"}
        assert str(tmp_path) not in json.dumps(metadata) and "/" not in own["base_model"]
        assert open_adapter(path).expert == expert


def test_inspect_shows_where_an_export_comes_from(tmp_path: Path) -> None:
    path = exported(tmp_path)[1]
    output = CliRunner().invoke(app, ["adapter", "inspect", str(path)]).output
    for part in (
        "scheme    diffusers; family wan2.2",
        "low_noise",
        "rank 3",
        "wan2.2/lora",
        "learning_rate",
        "base      tiny-wan2.2",
    ):
        assert part in output, output
