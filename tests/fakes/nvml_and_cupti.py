"""Builds the stand-ins for NVML and CUPTI: once for each content of their C files, in a second."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FLAGS = ("-std=c11", "-D_POSIX_C_SOURCE=200809L", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")


def fake_nvml() -> Path:
    """A folder for LD_LIBRARY_PATH with libnvidia-ml.so.1 in it."""
    return _built("libnvml.c", "libnvidia-ml.so.1").parent


def fake_cupti() -> Path:
    """A library to be opened by its path."""
    return _built("libcupti.c", "libcupti-fake.so")


def _built(source: str, library: str) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    text = (HERE / source).read_bytes()
    folder = Path(tempfile.gettempdir()) / f"supertuner-fakes-{os.getuid()}" / hashlib.sha256(text).hexdigest()[:16]
    made = folder / library
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            new = Path(scratch) / library
            command = [compiler, *FLAGS, f"-Wl,-soname,{library}", str(HERE / source), "-o", str(new), "-pthread"]
            subprocess.run(command, check=True)
            new.replace(made)  # several test processes may build at once: the last one wins, and all are alike
    return made
