"""The example of the seeds trains as it is written; only the places that it writes to are in a folder of the test."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

from supertuner.config.sources.load import load_config
from supertuner.tools.training import train

SHIPPED = Path(__file__).parents[2] / "examples/gh200_in_memory_example.json"


def test_the_shipped_example_trains_both_experts_through_the_ramp_and_exports_them(tmp_path):
    places = {
        "run.output_dir": str(tmp_path / "runs"),
        "cache_config.cache_dir": str(tmp_path / "cache"),
        "arena.home": str(tmp_path / "arenas"),
        "report.tensorboard": False,
    }
    done = train(load_config(SHIPPED, environ={}, overrides=places))
    assert (done.steps, done.stopped_by) == (12, None)
    lines = [json.loads(line) for line in (done.run_dir / "losses.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert {line["expert"] for line in steps} == {"high_noise", "low_noise"}
    sizes = [line["window"] for line in steps]
    assert sizes == sorted(sizes) and sizes[0] == 4 < sizes[-1]
    assert [path.name for path in done.exports] == [
        "gh200-in-memory_high_noise.safetensors",
        "gh200-in-memory_low_noise.safetensors",
    ]
    with safe_open(done.exports[0], "pt") as exported:
        assert all(name.startswith("transformer.") for name in exported.keys())  # noqa: SIM118
    assert (done.run_dir / "samples/step-00000012/grid.png").is_file()
    assert any((tmp_path / "cache").iterdir())
