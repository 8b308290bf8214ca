"""Builds and runs the eight-thread program with a sanitizer, which also instruments the fake driver."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.fakes.fake_libraries import HERE, MIB, ROOT, WARNINGS, build_library, environment, libcuda_sources

PROGRAM = ROOT / "tests/memory/overflow_allocator/overflow_threads.c"


def run_threads(sanitizer: str, operations: int, timeout_s: float) -> str:
    """The program's output after this many operations; any finding of the sanitizer fails the test."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler is installed")
    flags = (*WARNINGS, "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer", "-pthread")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "threads"
        compiled = subprocess.run(
            ["cc", *flags, "-o", str(program), str(PROGRAM), "-ldl"], capture_output=True, text=True
        )
        if "cannot find" in compiled.stderr:
            pytest.skip(f"this compiler has no {sanitizer} sanitizer")
        assert compiled.returncode == 0, compiled.stderr
        fake = build_library("libcuda.so.1", libcuda_sources(), flags, headers=[HERE / "libcuda" / "fake.h"])
        options = "halt_on_error=1:exitcode=66:detect_leaks=0"
        env = {
            **environment(hbm_bytes=64 * MIB),
            "LD_LIBRARY_PATH": os.pathsep.join([str(fake), os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(os.pathsep),
            "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
            "ASAN_OPTIONS": options,
        }
        done = subprocess.run(
            [str(program), str(operations)], env=env, capture_output=True, text=True, timeout=timeout_s
        )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr[:6000]}"
    return done.stdout
