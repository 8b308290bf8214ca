"""Training from a cache opens and reads no file: strace watches every thread through two epochs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cache.encoding import pictures
from tests.cache.two_epochs import BEGIN, END

ROOT = Path(__file__).resolve().parents[2]
CALLS = "open,openat,openat2,read,pread64,readv,preadv,preadv2,mmap"


@pytest.mark.parametrize("kind", ["unified_memory", "disk"])
def test_two_epochs_from_a_cache_open_and_read_neither_data_nor_cache(tmp_path: Path, wan, kind: str) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed here")
    shutil.copytree(wan[1].source.path, tmp_path / "model")
    pictures(tmp_path / "images", 4)
    pictures(tmp_path / "changing", 3)
    log = tmp_path / "strace.log"
    command = [
        "strace",
        "-f",
        "-y",
        "-e",
        f"trace={CALLS}",
        "-o",
        str(log),
        sys.executable,
        "-m",
        "tests.cache.two_epochs",
    ]
    done = subprocess.run(
        [*command, str(tmp_path), kind],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if "ptrace" in done.stderr and done.returncode != 0:
        pytest.skip(f"strace may not watch processes here: {done.stderr.strip()[:200]}")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = log.read_text(errors="replace").splitlines()
    begin, end = (next(n for n, line in enumerate(lines) if mark in line) for mark in (BEGIN, END))
    before, during = lines[:begin], lines[begin:end]
    for folder in ("images", "ram", "runs/cache"):
        assert any(str(tmp_path / folder) in line for line in before), f"strace would have seen {folder}"
    assert [line for line in during if str(tmp_path) in line] == []
