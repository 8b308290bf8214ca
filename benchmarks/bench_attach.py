"""The cost of an arena for an additional process: milliseconds to attach to a million records, and private memory.

Attaching validates everything except the bytes of the payloads. An additional process reads Private_Dirty from
/proc/self/smaps_rollup before it attaches and after one epoch of random batches, for datasets of different sizes. The
first process stays attached and has read every record, because the kernel counts a page of tmpfs as private if it has
only one user.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.harness import ClaimRow, FigureSpread, at_most, in_memory_folder, report, say
from supertuner.arena.home import ArenaHome
from supertuner.core.host import HostFacts

RECORDS = 1_000_000
ATTACHES = 25
ATTACH_LIMIT_MS = 50.0
DIRTY_LIMIT_MB = 16.0
SAMPLE_NBYTES = 100_000
SAMPLES = (500, 10_000)
BATCH = 64


def build(home: ArenaHome, name: str, count: int, payload: bytes) -> None:
    """Build an arena with two writers, with units in another order than their keys."""
    step = 7919  # a prime that divides none of the counts
    with home.build(name) as begun:
        writers = [begun.open_writer(), begun.open_writer()]
        for i in range(count):
            unit = writers[i % 2].begin(f"images/part-{i * step % count % 100:02d}/{i * step % count:09d}.jpg")
            unit.put("media", payload)
            unit.commit()
        begun.seal({"bench": "attach"})


def attach_ms(home: ArenaHome, name: str) -> list[float]:
    taken = []
    for _ in range(ATTACHES):
        gc.collect()
        begin = time.perf_counter()
        reader = home.attach(name)
        taken.append((time.perf_counter() - begin) * 1e3)
        reader.close()
    return taken


def private_dirty_mb() -> float:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("this kernel's smaps_rollup has no Private_Dirty")


def epoch(folder: Path, name: str) -> float:
    """In the additional process: growth of private memory in MB after one epoch, including the buffer of a batch."""
    order = np.random.default_rng(0)
    gc.collect()
    before = private_dirty_mb()
    reader = ArenaHome(folder).attach(name)
    out = np.empty((BATCH, reader.nbytes(0)), np.uint8)
    for _ in range(max(1, len(reader) // BATCH)):
        reader.gather(order.integers(0, len(reader), BATCH), out)
    gc.collect()
    return private_dirty_mb() - before


def epoch_apart(home: ArenaHome, name: str) -> float:
    command = [sys.executable, "-m", "benchmarks.bench_attach", "--epoch", str(home.path), name]
    root = Path(__file__).resolve().parents[1]
    with home.attach(name) as first:
        out = np.empty((1, first.nbytes(0)), np.uint8)
        for unit in range(len(first)):
            first.gather([unit], out)
        ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    return float(json.loads(ran.stdout))


def million_rows(home: ArenaHome) -> list[ClaimRow]:
    available = HostFacts().memory_available() or 0
    # Each record takes a page. If 4 GB are too much, records are empty: the index is the same, without payload pages.
    payload = b"x" if available > 8 << 30 else b""
    begin = time.perf_counter()
    build(home, "million", RECORDS, payload)
    say(
        f"built {RECORDS} units in {time.perf_counter() - begin:.1f} s; index of "
        f"{(home.path / 'million' / 'index').stat().st_size / 1e6:.0f} MB"
    )
    taken = attach_ms(home, "million")
    spread = FigureSpread(statistics.median(taken), min(taken), max(taken))
    rows = [at_most("attaching to an arena of a million records, all validated", spread, ATTACH_LIMIT_MS, unit="ms")]
    if payload:
        rows.append(
            at_most(
                "Private_Dirty of a further process, a million records",
                epoch_apart(home, "million"),
                DIRTY_LIMIT_MB,
                unit="MB",
            )
        )
    home.remove("million")
    return rows


def sample_rows(home: ArenaHome) -> list[ClaimRow]:
    rows = []
    for count in SAMPLES:
        build(home, "samples", count, os.urandom(SAMPLE_NBYTES))
        size = f"{count * SAMPLE_NBYTES / 1e6:.0f} MB"
        rows.append(
            at_most(
                f"Private_Dirty of a further process, {size} of 100 KB samples, with its batch of 6 MB",
                epoch_apart(home, "samples"),
                DIRTY_LIMIT_MB,
                unit="MB",
            )
        )
        home.remove("samples")
    return rows


def rows() -> list[ClaimRow]:
    with in_memory_folder() as folder:
        home = ArenaHome(folder)
        return million_rows(home) + sample_rows(home)


def main() -> int:
    return report(rows(), title="attach")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--epoch"]:
        print(json.dumps(epoch(Path(sys.argv[2]), sys.argv[3])))
        sys.exit(0)
    sys.exit(main())
