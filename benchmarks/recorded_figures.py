"""The recorded figures of the benchmarks, each with the commit, machine, versions and code for which it was measured.

`figures.json` has one `Recording` per benchmark. A recording holds a digest of the code that its figures speak of
(`BENCHMARKS`); if the code's digest differs, the figures are older than their code, and docs/benchmarks.md marks them.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import ClaimRow

ROOT: Final = Path(__file__).resolve().parents[1]
FIGURES: Final = ROOT / "benchmarks" / "figures.json"
FORMAT_VERSION: Final = 1
PACKAGES: Final = (
    *("torch", "numpy", "diffusers", "safetensors", "Pillow"),
    *("lmdb", "datasets", "webdataset", "mosaicml-streaming"),
)
"""The packages whose versions are recorded: those that compute, and the peers."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One file bench_NAME.py: the section of docs/benchmarks.md with its claims, and the code that they speak of."""

    section: str
    code: tuple[str, ...]
    """Files and folders, relative to the repository. The benchmark's own file is always part of it."""


_LOOP = (
    *("supertuner/train/loop.py", "supertuner/train/run", "supertuner/step", "supertuner/models/objective"),
    *("supertuner/data/ordering", "supertuner/cache/entries.py", "supertuner/arena/gather.py"),
    *("supertuner/optim/schedule.py", "benchmarks/runs.py"),
)
_RANKS = (*_LOOP, "supertuner/distributed", "benchmarks/ranks.py")
_STAGING = ("supertuner/data/staging", "supertuner/core/bulk_io.py", "supertuner/core/_bulk_io.c")
_PLAN_MODEL = ("paging_model.py", "plan_baselines.py", "plan_replay.py", "workloads.py", "plan_tables")
BENCHMARKS: Final[Mapping[str, Benchmark]] = {
    "loop": Benchmark("training", _LOOP),
    "saving": Benchmark("training", ("supertuner/train/checkpoint", "supertuner/core/durable.py", *_LOOP)),
    "start": Benchmark(
        "training",
        ("supertuner/cli", "supertuner/config", "supertuner/train/setup.py", "supertuner/train/encoding", *_LOOP),
    ),
    "many": Benchmark("training", _RANKS),
    "shards": Benchmark("training", _RANKS),
    "automagic": Benchmark("training", ("supertuner/optim/automagic",)),
    "allocator": Benchmark("memory", ("supertuner/memory/overflow_allocator", "benchmarks/bench_allocator.c")),
    "hints": Benchmark("memory", ("supertuner/memory/hints",)),
    "telemetry": Benchmark(
        "memory", ("supertuner/memory/telemetry", "supertuner/sinks/jsonlines.py", "supertuner/sinks/tensorboard.py")
    ),
    "model": Benchmark("memory", ("supertuner/memory/emulator", "supertuner/memory/machines.py")),
    "plan": Benchmark(
        "memory",
        (
            *("supertuner/plan/placement", "supertuner/memory/machines.py", "supertuner/memory/emulator"),
            *(f"benchmarks/{name}" for name in _PLAN_MODEL),
        ),
    ),
    "acting": Benchmark("memory", ("supertuner/train/offload", "supertuner/step/train_step.py")),
    "trace": Benchmark("memory", ("supertuner/plan/trace",)),
    "cache": Benchmark("data", ("supertuner/cache", "supertuner/arena")),
    "attach": Benchmark("data", ("supertuner/arena",)),
    "node": Benchmark(
        "data",
        (
            *("supertuner/arena", "supertuner/cache", "supertuner/train/encoding", "supertuner/data/corpus"),
            *("supertuner/data/corpus_loader.py", "benchmarks/large_set.py", "benchmarks/node_faults.py", *_STAGING),
        ),
    ),
    "staging": Benchmark("data", (*_STAGING, "supertuner/arena")),
    "decode": Benchmark("data", ("supertuner/data/decode", "supertuner/data/batching")),
    "gather": Benchmark("data", ("supertuner/arena", "benchmarks/peers.py")),
    "keys": Benchmark("data", ("supertuner/models/adapters", "supertuner/train/export/adapter_files.py")),
}


@dataclass(frozen=True, slots=True)
class Recording:
    """The claims of one benchmark as they were measured at one time."""

    commit: str
    """The commit whose code was measured; it ends with `+` if the code had changes that were not committed."""
    date: str
    code: str
    """The digest of the code that the figures speak of."""
    machine: str
    versions: Mapping[str, str]
    seconds: float
    """How long the benchmark took."""
    other_cpus: float | None
    """How many CPUs other programs used meanwhile; None where the kernel does not say."""
    claims: tuple[ClaimRow, ...]


def read_recordings(file: Path = FIGURES) -> dict[str, Recording]:
    """The recordings by benchmark; empty if there is no file."""
    if not file.exists():
        return {}
    content = json.loads(file.read_bytes())
    assert content["version"] == FORMAT_VERSION, f"{file} has version {content['version']}, not {FORMAT_VERSION}"
    return {
        name: Recording(**{**fields, "claims": tuple(_claim_from_json(claim) for claim in fields["claims"])})
        for name, fields in content["benchmarks"].items()
    }


def write_recording(name: str, recording: Recording, file: Path = FIGURES) -> None:
    """Replace the recording of one benchmark. An interrupted write leaves the file as it was."""
    recordings = {**read_recordings(file), name: recording}
    benchmarks = {
        name: {**dataclasses.asdict(recordings[name]), "claims": [_claim_to_json(c) for c in recordings[name].claims]}
        for name in sorted(recordings)
    }
    text = json.dumps({"version": FORMAT_VERSION, "benchmarks": benchmarks}, indent=1, ensure_ascii=False)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(file)


def _claim_to_json(row: ClaimRow) -> dict[str, Any]:
    """The fields of a claim; figures that are not a number become null, which JSON has."""
    fields = dataclasses.asdict(row)
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in fields.items()}


def _claim_from_json(fields: Mapping[str, Any]) -> ClaimRow:
    numbers = {key: math.nan if fields[key] is None else fields[key] for key in ("ratio", "limit")}
    spread = None if fields["spread"] is None else tuple(fields["spread"])
    return ClaimRow(**{**fields, **numbers, "spread": spread})


def is_outdated(name: str, recording: Recording, root: Path = ROOT) -> bool:
    """Whether the code that the figures speak of has changed since they were measured."""
    return recording.code != code_digest((f"benchmarks/bench_{name}.py", *BENCHMARKS[name].code), root)


def code_digest(paths: Sequence[str], root: Path = ROOT) -> str:
    """A digest of the code in these files and folders.

    Blank lines, comment lines and docstrings do not count, because they change no figure. It reads files only, so that
    it works without git and is the same under every version of Python.
    """
    files: set[Path] = set()
    for path in paths:
        place = root / path
        assert place.exists(), f"{path} does not exist; correct BENCHMARKS in benchmarks/recorded_figures.py"
        files.update(
            [place] if place.is_file() else (f for f in place.rglob("*") if f.suffix in (".py", ".c", ".json"))
        )
    digest = hashlib.sha256()
    for file in sorted(files):
        code = _python_code(file.read_text("utf-8")) if file.suffix == ".py" else file.read_text("utf-8")
        digest.update(f"{file.relative_to(root).as_posix()}\0{code}\0".encode())
    return digest.hexdigest()[:16]


@functools.cache
def _python_code(source: str) -> str:
    """Source without blank lines, comment lines and docstrings, also those below an assignment."""
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documentation.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), start=1)
    return "\n".join(
        line for number, line in lines if number not in documentation and line.strip() and line.strip()[0] != "#"
    )


def current_commit() -> str:
    """The short name of the current commit, with `+` if code differs from it; "unknown" outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "supertuner", "benchmarks/*.py")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine_text() -> str:
    """The CPUs and memory of this machine, such as "2 × AMD EPYC (x86_64), 24 GiB"."""
    models = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} × {models[0] if models else 'CPU'} ({platform.machine()}), {memory_gib:.0f} GiB"


def package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # a peer that is not installed; its claim says so
    return versions


class OtherProgramsMeter:
    """Measures how many CPUs programs other than this process and its children use, from its creation on."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._busy_s, self._own_s = _busy_seconds(), _own_seconds()

    def other_cpus(self) -> float | None:
        """The mean number of CPUs used by others; None where the kernel does not say. Children must have ended."""
        busy_s = _busy_seconds()
        if busy_s is None or self._busy_s is None:
            return None
        others_s = (busy_s - self._busy_s) - (_own_seconds() - self._own_s)
        return round(max(0.0, others_s / (time.monotonic() - self._begin)), 2)


def _busy_seconds() -> float | None:
    """CPU seconds of all programs since boot, with what the hypervisor gave to others; /proc/stat, proc(5)."""
    total = next((line.split()[1:] for line in _lines("/proc/stat") if line.startswith("cpu ")), None)
    if total is None:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(ticks) for ticks in total[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _lines(file: str) -> list[str]:
    return Path(file).read_text().splitlines() if Path(file).exists() else []
