"""Builds the fake driver libraries of the tests: once per content, in a temporary folder, safe among processes.

A fake is a shared library with the real one's SONAME. Programs get it by `LD_LIBRARY_PATH` (`environment`), so that the
one process that is meant sees it and no other test. `load_fake` is for such a process: what tests ask of the double.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WARNINGS = ("-std=gnu11", "-Wall", "-Wextra", "-Werror")
MIB = 1 << 20


def libcuda_sources() -> list[Path]:
    """The C files of the fake libcuda. The phantom adds stubs of its own to them."""
    return sorted((HERE / "libcuda").glob("*.c"))


def fake_libcuda() -> Path:
    """The folder with libcuda.so.1, for LD_LIBRARY_PATH."""
    flags = (*WARNINGS, "-O2", "-fvisibility=hidden", "-pthread")
    return build_library("libcuda.so.1", libcuda_sources(), flags, headers=[HERE / "libcuda" / "fake.h"])


def fake_nvml() -> Path:
    """The folder with libnvidia-ml.so.1, for LD_LIBRARY_PATH."""
    return build_library("libnvidia-ml.so.1", [HERE / "libnvml.c"], (*WARNINGS, "-O1"))


def fake_cupti() -> Path:
    """A CUPTI under a name of its own, to be opened by its path: it does not get in anybody's way."""
    name = "libcupti-fake.so"
    return build_library(name, [HERE / "libcupti.c"], (*WARNINGS, "-O1", "-pthread")) / name


def build_library(soname: str, sources: Sequence[Path], flags: Sequence[str], headers: Sequence[Path] = ()) -> Path:
    """The folder that holds `soname`, compiled from these sources unless the same was compiled before."""
    command = ["cc", "-shared", "-fPIC", *flags, f"-Wl,-soname,{soname}"]
    content = hashlib.sha256(" ".join(command).encode())
    for path in (*sources, *headers):
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"supertuner-fakes-{os.getuid()}" / content.hexdigest()[:16]
    if not (folder / soname).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built_file = Path(scratch) / soname
            subprocess.run([*command, "-o", str(built_file), *map(str, sources), "-ldl"], check=True)
            os.replace(built_file, folder / soname)  # another process may have been quicker: the same bytes
    return folder


def environment(profile: str = "gh200", *, hbm_bytes: int = 64 * MIB, **more: str | int) -> dict[str, str]:
    """This process's environment with the fake driver in it: `more` are FAKECUDA_* by their last part in lower case."""
    fake = {"profile": profile, "hbm": hbm_bytes, **more}
    paths = [str(fake_libcuda()), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FAKECUDA_")}
    named = {f"FAKECUDA_{name.upper()}": str(value) for name, value in fake.items()}
    return {**inherited, **named, "LD_LIBRARY_PATH": ":".join(paths), "OMP_NUM_THREADS": "1"}


def run_python(code: str, env: Mapping[str, str], timeout_s: float = 120) -> str:
    """What a program of these lines says, in a process of its own with that environment."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=dict(env), cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


class FakeCuda:
    """The double itself, for a process that runs on it: where pages are, what was called, and what shall fail."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        signatures: dict[str, tuple[object, list[object]]] = {
            "resident_bytes": (ctypes.c_size_t, [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]),
            "evicted_bytes": (ctypes.c_size_t, []),
            "hbm_used": (ctypes.c_size_t, [ctypes.c_int]),
            "fault": (None, [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_long]),
            "calls": (ctypes.c_long, [ctypes.c_char_p]),
            "reset": (None, []),
            "host_touch": (None, [ctypes.c_size_t, ctypes.c_size_t]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(library, f"fakecuda_{name}")
            function.restype, function.argtypes = result, arguments

    def resident_bytes(self, address: int, nbytes: int, device: int) -> int:
        """Bytes of the range on that GPU; -1: in host memory; -2: not populated."""
        return int(self._library.fakecuda_resident_bytes(address, nbytes, device))

    def evicted_bytes(self) -> int:
        return int(self._library.fakecuda_evicted_bytes())

    def hbm_used(self, device: int = 0) -> int:
        return int(self._library.fakecuda_hbm_used(device))

    def fault(self, call: str, code: int, first: int = 1, times: int = 1) -> None:
        """From the `first` call of that name from now on, `times` times (0: for good), it returns `code`."""
        self._library.fakecuda_fault(call.encode(), code, first, times)

    def calls(self, name: str) -> int:
        """How often it was called since the start, or since `reset`; refused calls count."""
        return int(self._library.fakecuda_calls(name.encode()))

    def reset(self) -> None:
        """Faults, counts, and which system memory was on a GPU are forgotten. Memory that was taken stays taken."""
        self._library.fakecuda_reset()

    def host_touch(self, address: int, nbytes: int) -> None:
        """The host uses the range: the double cannot see loads and stores."""
        self._library.fakecuda_host_touch(address, nbytes)

    def move_pages(self, addresses: Sequence[int]) -> list[int]:
        """What the kernel's move_pages would answer: a node, or a negative error, for each address."""
        pages = (ctypes.c_void_p * len(addresses))(*addresses)
        status = (ctypes.c_int * len(addresses))()
        failed = self._library.fakecuda_move_pages(0, ctypes.c_ulong(len(addresses)), pages, None, status, 0)
        assert failed == 0
        return list(status)


def load_fake() -> FakeCuda:
    """Load the double into this process, unless it runs on it already: whoever opens libcuda.so.1 next gets it.

    For processes that live for one test only: a fake driver in the suite's own process would show in every later test.
    """
    return FakeCuda(ctypes.CDLL(str(fake_libcuda() / "libcuda.so.1"), mode=os.RTLD_GLOBAL | os.RTLD_NOW))
