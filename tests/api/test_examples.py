"""The programs of examples/python run as they are, and print what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python"


def run(name: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_forecast_over_three_machines() -> None:
    lines = [line for line in run("forecast_machines.py") if "fits:" in line]
    assert [line.split()[0] for line in lines] == ["gh200-96", "h100-80-sxm", "rtx-4090"]
    assert all("fits: True" in line and "GiB" in line for line in lines)


def test_hints_and_overflow_in_a_plain_loop() -> None:
    """Without a GPU the outcomes say so; with one, they come from its driver."""
    text = "\n".join(run("hints_and_overflow.py"))
    assert len(re.findall(r"^step \d: loss \d\.\d+$", text, re.MULTILINE)) == 5
    assert re.search(r"^prefetch: \{'(applied|applied-unverified|no-effect|unsupported|refused|error): ", text, re.M)
    assert "memory that spilled to the host:" in text


def test_the_arena_in_a_plain_dataloader() -> None:
    lines = run("arena_dataset.py")
    assert lines[0].startswith("12 samples; the first: (3, 32, 32), 'a ")
    assert len([line for line in lines if line.startswith("(2, 3, 32, 32) torch.uint8")]) == 6
    assert re.fullmatch(r"3 processes map the same [1-9]\d* files: True", lines[-1])


def test_training_that_a_callback_stops() -> None:
    lines = run("train_with_callback.py")
    assert re.fullmatch(r"\d+ steps, stopped by callback; \d+ losses", lines[-2])
    names = r"example-step\d{8}_high_noise\.safetensors, example-step\d{8}_low_noise\.safetensors"
    assert re.fullmatch(f"adapters: {names}", lines[-1])
