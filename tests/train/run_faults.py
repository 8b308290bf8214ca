"""Builds saving_faults.c and runs saving_faults.py below it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def run_saving_faults(*options: str) -> dict[str, Any]:
    """Scenario → the outcome of every fault, and the calls of an undisturbed save."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the library that makes calls fail")
    below = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="supertuner-test-", dir=below) as work:
        library = Path(work) / "saving_faults.so"
        source = HERE / "saving_faults.c"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        (Path(work) / "trials").mkdir()
        ran = subprocess.run(
            [sys.executable, "-m", "tests.train.saving_faults", f"{work}/trials", *options],
            cwd=HERE.parents[1],
            env={"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "PATH": os.defpath},
            capture_output=True,
            text=True,
        )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found
