"""Reading batches from a cache opens and reads no file: strace observes every thread for two epochs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.encoding.encoding_helpers import pictures
from tests.train.encoding.two_epochs import BEGIN, END

ROOT = Path(__file__).resolve().parents[3]
CALLS = "open,openat,openat2,read,pread64,readv,preadv,preadv2,mmap"
KINDS = ("unified_memory", "disk")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, wan) -> tuple[Path, list[str]]:
    """The folder in which a process has read two epochs from every kind of cache, and the lines of its strace log."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed here")
    folder = tmp_path_factory.mktemp("traced")
    for kind in KINDS:
        shutil.copytree(wan[1].source.path, folder / kind / "model")
        pictures(folder / kind / "images", 4)
        pictures(folder / kind / "changing", 3)
    log = folder / "strace.log"
    strace = ["strace", "-f", "-y", "-e", f"trace={CALLS}", "-o", str(log)]
    done = subprocess.run(
        [*strace, sys.executable, "-m", "tests.train.encoding.two_epochs", str(folder), *KINDS],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if "ptrace" in done.stderr and done.returncode != 0:
        pytest.skip(f"strace may not trace processes here: {done.stderr.strip()[:200]}")
    assert done.returncode == 0, done.stderr[-2000:]
    return folder, log.read_text(errors="replace").splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_two_epochs_from_a_cache_open_and_read_neither_data_nor_cache(
    traced: tuple[Path, list[str]], kind: str
) -> None:
    folder, lines = traced
    begin, end = (next(n for n, line in enumerate(lines) if f"{mark}-{kind}" in line) for mark in (BEGIN, END))
    before, during = lines[:begin], lines[begin:end]
    for part in ("images", "ram", "runs/cache"):
        assert any(str(folder / kind / part) in line for line in before), f"strace logs accesses to {part}"
    assert [line for line in during if str(folder) in line] == []
