"""The GH200 forks' example trains unchanged; only its output folders are redirected into a temporary folder."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

from supertuner.api.training import train
from supertuner.config.sources.load import load_config

SHIPPED = Path(__file__).parents[2] / "examples/gh200_in_memory_example.json"


def test_the_shipped_example_trains_both_experts_through_the_ramp_and_exports_them(tmp_path):
    folders = {
        "run.output_dir": str(tmp_path / "runs"),
        "cache_config.cache_dir": str(tmp_path / "cache"),
        "arena.home": str(tmp_path / "arenas"),
        "report.tensorboard": False,
    }
    result = train(load_config(SHIPPED, environ={}, overrides=folders))
    assert (result.steps, result.stopped_by) == (12, None)
    lines = [json.loads(line) for line in (result.run_dir / "losses.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert {line["expert"] for line in steps} == {"high_noise", "low_noise"}
    sizes = [line["window"] for line in steps]
    assert sizes == sorted(sizes) and sizes[0] == 4 < sizes[-1]
    assert [path.name for path in result.adapters] == [
        "gh200-in-memory-step00000012_high_noise.safetensors",
        "gh200-in-memory-step00000012_low_noise.safetensors",
    ]
    with safe_open(result.adapters[0], "pt") as exported:
        assert all(name.startswith("transformer.") for name in exported.keys())  # noqa: SIM118
    assert (result.run_dir / "samples/step-00000012/grid.png").is_file()
    assert any((tmp_path / "cache").iterdir())
