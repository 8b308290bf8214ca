"""Staging with checksums, compared with a plain multi-threaded read of the same files into RAM; and its peak memory.

Each turn runs in a forked child: the rivals start with fresh memory, as a training program does, and pay for its page
faults. Both list the folder and use the same number of threads on chunks of the same size. The plain read is
`open(path, "rb").read()`; a read with bare system calls is timed and printed too. The page cache is warm, because a
disk would hide the cost of our code. CPU time is printed too, because it does not depend on other processes. Cleaning
up is not timed.
"""

from __future__ import annotations

import gc
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

from benchmarks.harness import ClaimRow, FigureSpread, at_least, at_most, report, say
from supertuner.arena.home import ArenaHome, default_home
from supertuner.arena.run_context import RunContext
from supertuner.config.settings.data import DatasetSettings
from supertuner.core.host import HostFacts
from supertuner.core.types import bytes_text
from supertuner.data.staging.stager import DatasetStager

CASES = {"100 KB": (4000, 384), "1 MB": (400, 1216)}
"""Number of files, and the side of the picture in each."""
ROUNDS, CHUNK = 11, 64
SPEED_LIMIT, MEMORY_LIMIT = 0.80, 1.05


def make_folder(folder: Path, files: int, side: int) -> int:
    """Write JPEG files. Returns their total size."""
    from PIL import Image

    rng = np.random.default_rng(0)
    pictures = []
    for _ in range(16):
        out = io.BytesIO()
        pixels = rng.integers(0, 255, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(out, "JPEG", quality=80)
        pictures.append(out.getvalue())
    for number in range(files):
        (folder / f"{number:06d}.jpg").write_bytes(pictures[number % 16])
    return sum(len(pictures[number % 16]) for number in range(files))


def plain(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def bare(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def read_all(folder: Path, threads: int, read: Callable[[str], bytes]) -> list[bytes]:
    """Read all files of a folder into RAM with a thread pool, in the simplest fast way."""

    def chunk(paths: list[str]) -> list[bytes]:
        return [read(path) for path in paths]

    with os.scandir(folder) as entries:
        paths = sorted(entry.path for entry in entries)
    with ThreadPoolExecutor(threads) as pool:
        parts = pool.map(chunk, [paths[at : at + CHUNK] for at in range(0, len(paths), CHUNK)])
        return [content for part in parts for content in part]


def stage(folder: Path, home: Path, threads: int, files: int) -> int:
    dataset = DatasetSettings(id="bench", instance_data_dir=folder, in_memory={"num_workers": threads})  # type: ignore[arg-type]
    result = DatasetStager(ArenaHome(home), RunContext.silent(home)).stage(dataset)
    assert result.files == files and not result.reused, result
    return result.stored_bytes


def in_child(work: Callable[[], object]) -> dict[str, float]:
    """Run `work` in a forked child: its wall seconds, CPU seconds, result, and growth of peak resident memory."""
    gc.collect()
    gc.freeze()  # a collection in the child would copy every page that it shares with the parent
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        begin, cpu = time.perf_counter(), time.process_time()
        result = work()
        figures = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}
        figures |= {"growth": _status("VmHWM") - before, "result": result if isinstance(result, int) else 0}
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


def rows() -> list[ClaimRow]:
    return [row for name, (files, side) in CASES.items() for row in _case(name, files, side)]


def _case(name: str, files: int, side: int) -> list[ClaimRow]:
    folder = Path(tempfile.mkdtemp(prefix="bench-staging-"))
    home = default_home().with_name(f"bench-staging-{os.getpid()}")
    threads = HostFacts().cpus()
    try:
        total = make_folder(folder, files, side)
        say(f"{files} JPEG files of about {name}, {bytes_text(total)}, {threads} threads, {ROUNDS} rounds in turns")
        rivals: dict[str, Callable[[], object]] = {
            "plain": lambda: read_all(folder, threads, plain),
            "bare": lambda: read_all(folder, threads, bare),
            "ours": lambda: stage(folder, home, threads, files),
        }
        return _claims(name, _rounds(rivals, home), total)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(home, ignore_errors=True)


def _rounds(rivals: dict[str, Callable[[], object]], home: Path) -> dict[str, list[dict[str, float]]]:
    """The figures of every rival in every round; the order rotates."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in rivals}
    names = list(rivals)
    for turn in range(ROUNDS + 1):
        for name in names[turn % 3 :] + names[: turn % 3]:
            figures = in_child(rivals[name])
            shutil.rmtree(home, ignore_errors=True)
            if turn:  # the first one warms the page cache
                found[name].append(figures)
    return found


def _claims(size: str, found: dict[str, list[dict[str, float]]], total: int) -> list[ClaimRow]:
    for name, rounds in found.items():
        taken = [one["seconds"] for one in rounds]
        cpu = statistics.median(one["cpu"] for one in rounds)
        median = statistics.median(taken)
        spread = f"{min(taken):.3f} to {max(taken):.3f}"
        say(f"  {name:<6} {median:.3f} s ({spread}), CPU {cpu:.3f} s, {bytes_text(total / median)}/s")
    ours = found["ours"]
    bare_share = _ratio(found["bare"], ours, "seconds")
    say(f"  share of the bare read: {bare_share.median:.3g} ({bare_share.low:.3g} to {bare_share.high:.3g})")
    note = f"by CPU time {_ratio(found['plain'], ours, 'cpu').median:.2f}"
    share = _ratio(found["plain"], ours, "seconds")
    peak = _spread([(one["result"] + one["growth"]) / one["result"] for one in ours])
    return [
        at_least(f"staging {size} files, share of a plain multi-threaded read", share, SPEED_LIMIT, note=note),
        at_most(f"staging {size} files, peak memory relative to stored bytes", peak, MEMORY_LIMIT),
    ]


def _ratio(theirs: list[dict[str, float]], ours: list[dict[str, float]], figure: str) -> FigureSpread:
    """Our speed divided by theirs, per round."""
    return _spread([one[figure] / other[figure] for one, other in zip(theirs, ours, strict=True)])


def _spread(values: list[float]) -> FigureSpread:
    return FigureSpread(statistics.median(values), min(values), max(values))


def main() -> int:
    return report(rows(), title="staging")


if __name__ == "__main__":
    sys.exit(main())
