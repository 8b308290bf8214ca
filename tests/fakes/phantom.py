"""Builds the phantom: fake NVIDIA libraries on which the real CUDA build of torch runs without a GPU.

usage: python phantom.py --cuda-include DIR --out DIR      (by scripts/setup_phantom.sh; needs gcc, g++ and nm)

The requirements are read from torch: the libraries that its own libraries name, and the symbols that they leave
undefined, with their versions. Symbols that a C file here defines come from it; every other symbol becomes a generated
function with one fixed return value. So a new release of torch that needs more symbols still loads, and a missing
function reports itself when it is called. Guarantees: the folder is replaced as a whole, and only if a source, this
file or torch changed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
# A fake function has the parameters of the real one, and ignores most of them.
FLAGS: Final = ("-std=gnu11", "-O1", "-g", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-pthread")
# Generated functions ignore their arguments; some have names of gcc built-ins.
GENERATED: Final = ("-std=gnu11", "-O1", "-fPIC", "-w", "-fno-builtin")
STAMP: Final = ".built-from"


@dataclass(frozen=True, slots=True)
class FakeLibrary:
    """How one library is faked."""

    default_answer: int
    """Return value of functions that no C file defines: the library's code for success or for "not supported"."""
    sources: tuple[str, ...] = ()
    succeeds: str = "$^"
    """Pattern of further functions that return success; by default it matches nothing."""
    makers: str = "$^"
    """Pattern of functions that create an object: their first argument receives an address."""
    prefixes: tuple[str, ...] = ()
    """Prefixes of its symbols, for symbols without a version that names the library."""


# By the name before ".so". Zero means success in all of them.
LIBRARIES: Final = {
    "libcuda": FakeLibrary(801, ("libcuda/*.c", "libcuda_kernels.c"), prefixes=("cu",)),
    "libcudart": FakeLibrary(801, ("libcudart*.c",)),
    "libcudnn": FakeLibrary(
        3000,
        ("libcudnn.c",),
        succeeds=r"cudnn(Set|Destroy|BatchNormalization)\w+",
        makers=r"cudnnCreate\w+Descriptor",
    ),
    "libcublas": FakeLibrary(0, ("libcublas.c",)),
    "libcublasLt": FakeLibrary(0, ("libcublasLt.c",), makers=r"cublasLt\w*Create"),
    "libcusolver": FakeLibrary(0, ("libcusolver.c",), makers=r"cusolverDnCreate\w+"),
    "libcusparse": FakeLibrary(10, makers="cusparseCreate"),
    "libcusparseLt": FakeLibrary(10, prefixes=("cusparseLt",)),
    "libcufft": FakeLibrary(16),
    "libcurand": FakeLibrary(1, prefixes=("curand",)),
    "libcufile": FakeLibrary(5001, prefixes=("cuFile",)),
    "libcupti": FakeLibrary(27),
    "libnvrtc": FakeLibrary(11, ("libnvrtc.c",)),
    "libnvJitLink": FakeLibrary(1, prefixes=("nvJitLink",)),
    "libnccl": FakeLibrary(5, prefixes=("nccl", "pnccl")),
    "libnvshmem_host": FakeLibrary(1, prefixes=("nvshmem",)),
}
# Size queries must not leave their result unset: cuSOLVER's code for "not supported".
CUSOLVER_SIZES: Final = re.compile(r"cusolver\w+_bufferSize")
# Functions that return text, in any library.
NOT_SUPPORTED_TEXT: Final = '"not supported by the phantom: see docs/phantom.md"'
TEXT_FUNCTIONS: Final = re.compile(r"\w+Get(Last)?(Error|Status)(String|Name)?")


@dataclass
class WantedSymbols:
    """What torch's libraries require from other libraries."""

    sonames: set[str] = field(default_factory=set)
    symbols: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Version (usually the library's name) → symbols; the empty version holds those without one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda-include", type=Path, required=True, help="the folder that has cuda_runtime_api.h")
    parser.add_argument("--out", type=Path, required=True, help="the folder for LD_LIBRARY_PATH")
    parser.add_argument("--torch", type=Path, help="torch's folder (default: the one this Python would import)")
    arguments = parser.parse_args()
    torch = arguments.torch or torch_folder()
    stamp = digest(torch)
    if (arguments.out / STAMP).is_file() and (arguments.out / STAMP).read_text() == stamp:
        return
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=arguments.out.parent) as making:
        built_folder = Path(making) / "libraries"
        built_folder.mkdir()
        build(torch, arguments.cuda_include, built_folder, Path(making))
        (built_folder / STAMP).write_text(stamp)
        shutil.rmtree(arguments.out, ignore_errors=True)
        os.replace(built_folder, arguments.out)
    sys.stdout.write(f"phantom: built {len(list(arguments.out.glob('*.so*')))} fake libraries in {arguments.out}\n")


def build(torch: Path, include: Path, out: Path, scratch: Path) -> None:
    """Build all libraries that torch requires into `out`."""
    wanted = wanted_symbols(torch)
    flags = [f"-I{include}", f"-DFAKE_CUDNN_VERSION={cudnn_version()}"]
    objects = {name: compiled(library, flags, scratch / name) for name, library in LIBRARIES.items()}
    # The fake runtime calls the fake driver, which is therefore built first, with the symbols that either requires.
    wanted.symbols[""] |= {name for name in undefined(objects["libcudart"]) if re.match(r"cu[A-Z]", name)}
    for soname in sorted(wanted.sonames, key=lambda name: (not name.startswith("libcuda."), name)):
        name = soname.split(".so")[0]
        library = LIBRARIES.get(name, FakeLibrary(default_answer=1))
        version = version_of(name, soname, wanted)
        have = defined(objects.get(name, []))
        missing = sorted(symbols_of(name, version, library, wanted) - have)
        stubs = scratch / f"{name}_stubs.c"
        stubs.write_text("".join(stub(symbol, library) for symbol in missing) + "extern int phantom_is_here;\n")
        parts = [*objects.get(name, []), compile_one(stubs, GENERATED, scratch / f"{name}_stubs.o")]
        if name == "libcudart":
            parts.append(out / "libcuda.so.1")
        link(soname, parts, version, out, scratch)
    # The only part in C++: it uses torch's own allocator.
    headers, libraries = (f"-I{torch / 'include'}", f"-I{include}"), (f"-L{torch / 'lib'}", "-lc10_cuda", "-lc10")
    command = ("g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", *headers)
    run(*command, "-o", str(out / "libphantom_zeros.so"), str(HERE / "torch_zeros.cpp"), *libraries)


def stub(symbol: str, library: FakeLibrary) -> str:
    """One generated function."""
    if re.fullmatch(library.makers, symbol):
        return f"int {symbol}(void **made) {{ static char one[64]; *made = one; return 0; }}\n"
    if TEXT_FUNCTIONS.fullmatch(symbol):
        return f"const char *{symbol}(void) {{ return {NOT_SUPPORTED_TEXT}; }}\n"
    if symbol == "cuptiGetResultString":  # the only one that returns its text through a pointer
        return f"int {symbol}(int result, const char **words) {{ *words = {NOT_SUPPORTED_TEXT}; return 0; }}\n"
    answer = 0 if re.fullmatch(library.succeeds, symbol) else library.default_answer
    if CUSOLVER_SIZES.fullmatch(symbol):
        answer = 9
    return f"int {symbol}(void) {{ return {answer}; }}\n"


def symbols_of(name: str, version: str, library: FakeLibrary, wanted: WantedSymbols) -> set[str]:
    """The symbols that torch requires from this library: those with its version, and those with its prefix and no
    version.
    """
    bare = {symbol for symbol in wanted.symbols[""] if owner(symbol) == name}
    return bare | (wanted.symbols[version] if version else set())


def owner(symbol: str) -> str | None:
    """The library of a symbol without a version: the one with the longest matching prefix."""
    fitting = [
        (len(prefix), name)
        for name, library in LIBRARIES.items()
        for prefix in library.prefixes
        # "cu" is the driver's only before a capital: cuMemAlloc, not curandCreate.
        if symbol.startswith(prefix) and (prefix != "cu" or symbol[2:3].isupper())
    ]
    return max(fitting)[1] if fitting else None


def version_of(name: str, soname: str, wanted: WantedSymbols) -> str:
    """The version of its symbols: its own soname, with one exception."""
    if soname in wanted.symbols:
        return soname
    return "NVSHMEM" if name == "libnvshmem_host" and "NVSHMEM" in wanted.symbols else ""


def wanted_symbols(torch: Path) -> WantedSymbols:
    wanted = WantedSymbols()
    for library in sorted((torch / "lib").glob("*.so*")):
        for line in lines("readelf", "-d", str(library)):
            needed = re.search(r"\(NEEDED\).*\[(lib(?:cu|nv|nccl)[^\]]*)\]", line)
            if needed:
                wanted.sonames.add(needed[1])
        for line in lines("nm", "-D", "--undefined-only", str(library)):
            name, _, version = line.split()[-1].partition("@")
            wanted.symbols[version.lstrip("@")].add(name)
    return wanted


def compiled(library: FakeLibrary, flags: Iterable[str], folder: Path) -> list[Path]:
    folder.mkdir()
    sources = sorted(path for pattern in library.sources for path in HERE.glob(pattern))
    return [compile_one(source, (*FLAGS, *flags), folder / f"{source.stem}.o") for source in sources]


def compile_one(source: Path, flags: Iterable[str], out: Path) -> Path:
    run("gcc", "-c", *flags, "-o", str(out), str(source))
    return out


def link(soname: str, parts: Iterable[Path], version: str, out: Path, scratch: Path) -> None:
    command = ["gcc", "-shared", "-pthread", f"-Wl,-soname,{soname}", "-o", str(out / soname)]
    command += [*map(str, parts), "-ldl", "-lm"]
    script = scratch / "version.map"
    # The driver's symbols have no version; calls between its parts must not be visible to the whole process.
    hidden = "global: cu*; fakecuda_*; local: *;" if soname == "libcuda.so.1" else "global: *;"
    script.write_text(f"{version} {{ {hidden} }};\n")
    run(*command, f"-Wl,--version-script={script}" if version or soname == "libcuda.so.1" else "-Wl,--as-needed")


def defined(objects: Iterable[Path]) -> set[str]:
    return {line.split()[-1] for path in objects for line in lines("nm", "--defined-only", "-g", str(path)) if line}


def undefined(objects: Iterable[Path]) -> set[str]:
    return {line.split()[-1] for path in objects for line in lines("nm", "--undefined-only", str(path)) if line}


def torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise SystemExit("phantom: there is no torch here; scripts/setup_phantom.sh makes the environment")
    return Path(found.origin).parent


def cudnn_version() -> int:
    """The version of the cuDNN that this torch was built with, from its requirements: torch rejects an older one at run
    time.
    """
    for requirement in importlib.metadata.requires("torch") or ():
        pinned = re.match(r"nvidia-cudnn-cu\d+==(\d+)\.(\d+)\.(\d+)", requirement)
        if pinned:
            major, minor, patch = map(int, pinned.groups())
            return major * 10000 + minor * 100 + patch
    raise SystemExit("phantom: this torch does not name the cuDNN it was built with; is it a CUDA build?")


def digest(torch: Path) -> str:
    """A digest of everything that the libraries are built from."""
    state = hashlib.sha256()
    for path in sorted([*HERE.glob("lib*.[ch]"), *HERE.glob("libcuda/*.[ch]"), *HERE.glob("*.cpp"), Path(__file__)]):
        state.update(path.name.encode() + b"\0" + path.read_bytes())
    state.update((torch / "version.py").read_bytes() + str(torch).encode())
    return state.hexdigest()


def lines(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"phantom: {' '.join(command)}\n{done.stderr}")


if __name__ == "__main__":
    main()
