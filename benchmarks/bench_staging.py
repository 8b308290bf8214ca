"""Staging with checksums against a plain multi-threaded read of the same files into RAM, and the memory it peaks at.

Each turn runs in a forked child of its own: both rivals begin with fresh memory, as a training program does, and pay for
its pages. Both list the folder themselves and use the same number of threads on chunks of the same size. The page cache
is warm: a disk would hide what our code costs. Cleaning up is not timed.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.harness import Row, Spread, at_least, at_most, report, say
from supertuner.arena.home import Home, default_home
from supertuner.config.data import Dataset
from supertuner.core.events import Silence
from supertuner.core.host import Host
from supertuner.core.types import bytes_text
from supertuner.data.stage import Stager

FILES, SIDE, ROUNDS, CHUNK = 4000, 384, 11, 64
SPEED_LIMIT, MEMORY_LIMIT = 0.80, 1.05


def make_folder(folder: Path) -> int:
    """JPEG files of about 100 KB, all different to the file system; their total size."""
    from PIL import Image

    rng = np.random.default_rng(0)
    pictures = []
    for _ in range(16):
        out = io.BytesIO()
        pixels = rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(out, "JPEG", quality=80)
        pictures.append(out.getvalue())
    for number in range(FILES):
        (folder / f"{number:06d}.jpg").write_bytes(pictures[number % 16])
    return sum(len(pictures[number % 16]) for number in range(FILES))


def plain_read(folder: Path, threads: int) -> list[bytes]:
    """What anybody would write to get a folder into RAM fast."""

    def chunk(paths: list[str]) -> list[bytes]:
        found = []
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            found.append(os.read(fd, os.fstat(fd).st_size))
            os.close(fd)
        return found

    with os.scandir(folder) as entries:
        paths = sorted(entry.path for entry in entries)
    with ThreadPoolExecutor(threads) as pool:
        parts = pool.map(chunk, [paths[at : at + CHUNK] for at in range(0, len(paths), CHUNK)])
        return [content for part in parts for content in part]


def stage(folder: Path, home: Path, threads: int) -> int:
    silence = Silence()
    dataset = Dataset(id="bench", instance_data_dir=folder, in_memory={"num_workers": threads})  # type: ignore[arg-type]
    result = Stager(Home(home), Host(), silence, silence).stage(dataset)
    assert result.files == FILES and not result.reused, result
    return result.stored_bytes


def in_child(work: Callable[[], object]) -> dict[str, float]:
    """Seconds, result and growth of resident memory at its peak, of `work` in a process of its own."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        begin = time.perf_counter()
        result = work()
        taken = time.perf_counter() - begin
        number = result if isinstance(result, int) else 0
        figures = {"seconds": taken, "result": number, "growth": _status("VmHWM") - before}
        os.write(writing, json.dumps(figures).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        figures = json.loads(answer.read() or b"{}")
    if os.waitpid(pid, 0)[1] != 0:
        raise RuntimeError("a rival died")
    return dict(figures)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def rows() -> list[Row]:
    folder = Path(tempfile.mkdtemp(prefix="bench-staging-"))
    home = default_home().with_name(f"bench-staging-{os.getpid()}")
    threads = Host().cpus()
    try:
        total = make_folder(folder)
        say(f"{FILES} JPEG files, {bytes_text(total)}, {threads} threads, {ROUNDS} rounds in turns")
        return _rounds(folder, home, threads, total)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(home, ignore_errors=True)


def _rounds(folder: Path, home: Path, threads: int, total: int) -> list[Row]:
    ratios, peaks, seconds = [], [], {"plain": list[float](), "ours": list[float]()}
    for turn in range(ROUNDS + 1):
        figures: dict[str, dict[str, float]] = {}
        for name in ("plain", "ours") if turn % 2 else ("ours", "plain"):
            work = (lambda: plain_read(folder, threads)) if name == "plain" else lambda: stage(folder, home, threads)
            figures[name] = in_child(work)
            shutil.rmtree(home, ignore_errors=True)
        if turn == 0:  # the first one warms the page cache
            continue
        for name, found in figures.items():
            seconds[name].append(found["seconds"])
        ratios.append(figures["plain"]["seconds"] / figures["ours"]["seconds"])
        stored = figures["ours"]["result"]
        peaks.append((stored + figures["ours"]["growth"]) / stored)
    for name, taken in seconds.items():
        median = statistics.median(taken)
        say(f"  {name:<6} {median:.3f} s ({min(taken):.3f} to {max(taken):.3f}), {bytes_text(total / median)}/s")
    speed = Spread(statistics.median(ratios), min(ratios), max(ratios))
    peak = Spread(statistics.median(peaks), min(peaks), max(peaks))
    return [
        at_least("staging with checksums, share of a plain read", speed, SPEED_LIMIT),
        at_most("peak memory of staging, share of stored bytes", peak, MEMORY_LIMIT),
    ]


def main() -> int:
    return report(rows(), title="staging")


if __name__ == "__main__":
    sys.exit(main())
