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

ROOT = Path(__file__).resolve().parents[3]
CALLS = "open,openat,openat2,read,pread64,readv,preadv,preadv2,mmap"
KINDS = ("unified_memory", "disk")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, wan) -> tuple[Path, list[str]]:
    """The folder in which a process has gone through two epochs of every kind of cache, and what strace saw of it."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed here")
    folder = tmp_path_factory.mktemp("watched")
    for kind in KINDS:
        shutil.copytree(wan[1].source.path, folder / kind / "model")
        pictures(folder / kind / "images", 4)
        pictures(folder / kind / "changing", 3)
    log = folder / "strace.log"
    watching = ["strace", "-f", "-y", "-e", f"trace={CALLS}", "-o", str(log)]
    done = subprocess.run(
        [*watching, sys.executable, "-m", "tests.cache.two_epochs", str(folder), *KINDS],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if "ptrace" in done.stderr and done.returncode != 0:
        pytest.skip(f"strace may not watch processes here: {done.stderr.strip()[:200]}")
    assert done.returncode == 0, done.stderr[-2000:]
    return folder, log.read_text(errors="replace").splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_two_epochs_from_a_cache_open_and_read_neither_data_nor_cache(
    watched: tuple[Path, list[str]], kind: str
) -> None:
    folder, lines = watched
    begin, end = (next(n for n, line in enumerate(lines) if f"{mark}-{kind}" in line) for mark in (BEGIN, END))
    before, during = lines[:begin], lines[begin:end]
    for part in ("images", "ram", "runs/cache"):
        assert any(str(folder / kind / part) in line for line in before), f"strace would have seen {part}"
    assert [line for line in during if str(folder) in line] == []
