"""Builds the fake driver libraries of the tests: once per content, in a temporary folder, safe across processes.

A fake is a shared library with the SONAME of the real one. A program loads it through `LD_LIBRARY_PATH`
(`environment`), so that only the intended process sees it. In such a process `load_fake` gives tests access to the fake
itself.
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
    """The C files of the fake libcuda. The phantom adds its own stubs."""
    return sorted((HERE / "libcuda").glob("*.c"))


def fake_libcuda() -> Path:
    """The folder with libcuda.so.1, for LD_LIBRARY_PATH."""
    flags = (*WARNINGS, "-O2", "-fvisibility=hidden", "-pthread")
    return build_library("libcuda.so.1", libcuda_sources(), flags, headers=[HERE / "libcuda" / "fake.h"])


def fake_nvml() -> Path:
    """The folder with libnvidia-ml.so.1, for LD_LIBRARY_PATH."""
    return build_library("libnvidia-ml.so.1", [HERE / "libnvml.c"], (*WARNINGS, "-O1"))


def fake_cupti() -> Path:
    """A fake CUPTI with a different name, opened by its path, so that it does not affect other users of CUPTI."""
    name = "libcupti-fake.so"
    return build_library(name, [HERE / "libcupti.c"], (*WARNINGS, "-O1", "-pthread")) / name


def build_library(soname: str, sources: Sequence[Path], flags: Sequence[str], headers: Sequence[Path] = ()) -> Path:
    """The folder that holds `soname`, compiled from these sources unless a build of the same content exists."""
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
            os.replace(built_file, folder / soname)  # another process may have built the same bytes
    return folder


def environment(profile: str = "gh200", *, hbm_bytes: int = 64 * MIB, **more: str | int) -> dict[str, str]:
    """This process's environment with the fake driver; `more` are FAKECUDA_* variables by their last part in lower
    case.
    """
    fake = {"profile": profile, "hbm": hbm_bytes, **more}
    paths = [str(fake_libcuda()), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FAKECUDA_")}
    named = {f"FAKECUDA_{name.upper()}": str(value) for name, value in fake.items()}
    return {**inherited, **named, "LD_LIBRARY_PATH": ":".join(paths), "OMP_NUM_THREADS": "1"}


def run_python(code: str, env: Mapping[str, str], timeout_s: float = 120) -> str:
    """The output of this program in a separate process with this environment."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=dict(env), cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


class FakeCuda:
    """The fake driver itself, for a process that runs on it: page locations, call counts, and errors to inject."""

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
        """Bytes of the range on that GPU; device -1: in host memory; -2: not populated."""
        return int(self._library.fakecuda_resident_bytes(address, nbytes, device))

    def evicted_bytes(self) -> int:
        return int(self._library.fakecuda_evicted_bytes())

    def hbm_used(self, device: int = 0) -> int:
        return int(self._library.fakecuda_hbm_used(device))

    def fault(self, call: str, code: int, first: int = 1, times: int = 1) -> None:
        """From the `first` call of that name from now on, `times` times (0: forever), it returns `code`."""
        self._library.fakecuda_fault(call.encode(), code, first, times)

    def calls(self, name: str) -> int:
        """Number of calls since the start or the last `reset`, including failed ones."""
        return int(self._library.fakecuda_calls(name.encode()))

    def reset(self) -> None:
        """Reset faults, counts, and which system memory was on a GPU. Allocated memory stays allocated."""
        self._library.fakecuda_reset()

    def host_touch(self, address: int, nbytes: int) -> None:
        """The host uses the range; the fake cannot observe loads and stores."""
        self._library.fakecuda_host_touch(address, nbytes)

    def move_pages(self, addresses: Sequence[int]) -> list[int]:
        """What the kernel's move_pages would return: a node or a negative errno for each address."""
        pages = (ctypes.c_void_p * len(addresses))(*addresses)
        status = (ctypes.c_int * len(addresses))()
        failed = self._library.fakecuda_move_pages(0, ctypes.c_ulong(len(addresses)), pages, None, status, 0)
        assert failed == 0
        return list(status)


def load_fake() -> FakeCuda:
    """Load the fake into this process, unless it already runs on it: the next user of libcuda.so.1 receives it.

    Only for processes of a single test: a fake driver in the test suite's own process would affect every later test.
    """
    return FakeCuda(ctypes.CDLL(str(fake_libcuda() / "libcuda.so.1"), mode=os.RTLD_GLOBAL | os.RTLD_NOW))
