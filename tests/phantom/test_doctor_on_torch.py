"""The doctor on a real CUDA build of torch: stock, it sees the GPU, and refuses what the doctor says it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"FAKECUDA_HBM": str(256 << 20)}


def child(code: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **SMALL, "PYTHONPATH": str(ROOT), **environ}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=120)


def examined(cwd: Path, *options: str, **environ: str) -> dict[str, Any]:
    done = child(f"from supertuner.cli import main; main(['doctor', '--json', *{list(options)!r}])", cwd, **environ)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_stock_cuda_build_is_recognised_and_the_memory_below_it_tried(tmp_path: Path) -> None:
    found = examined(tmp_path, "--require", "gpu,managed,ats,cuda-torch,stock-torch,overflow,hints,allocation")
    assert found["torch"]["patched"] is False and found["torch"]["sees"] == 1
    assert found["allocation"]["passed"] and found["allocation"]["tested_bytes"] == 384 << 20
    assert found["allocation"]["figures"] == "stand-in"


def test_keys_that_torch_does_not_know_are_told_and_others_are_not(tmp_path: Path) -> None:
    given = "backend:cudaMallocAsync,no_such_key:1,max_split_size_mb:64"
    found = examined(tmp_path, "--skip-allocation", PYTORCH_ALLOC_CONF=given)
    assert found["torch"]["refuses"] == ["no_such_key"] and found["torch"]["sees"] == 1
    assert [c["mark"] for c in found["checks"] if c["name"] == "allocator settings"] == ["bad"]


def test_the_key_that_the_doctor_calls_a_trap_is_one(tmp_path: Path) -> None:
    trap = {"PYTORCH_CUDA_ALLOC_CONF": "use_uvm:True"}
    done = child("import torch; torch.zeros(1, device='cuda')", tmp_path, **trap)
    assert done.returncode != 0 and "Unrecognized key 'use_uvm'" in done.stderr
    found = examined(tmp_path, "--skip-allocation", **trap)
    marks = {check["name"]: check["mark"] for check in found["checks"]}
    assert marks["allocator settings"] == "bad" and marks["torch"] == "good"
