"""Staging with checksums against a plain multi-threaded read of the same files into RAM, and the memory it peaks at.

Each turn runs in a forked child of its own: the rivals begin with fresh memory, as a training program does, and pay for
its pages. They list the folder themselves and use the same number of threads on chunks of the same size. The plain read
is `open(path, "rb").read()`; one with bare system calls is timed and printed beside it. The page cache is warm: a disk
would hide what our code costs. Processor time is printed too, because waiting for a busy machine is nobody's merit.
Cleaning up is not timed.
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
    """What anybody would write to get a folder into RAM fast."""

    def chunk(paths: list[str]) -> list[bytes]:
        return [read(path) for path in paths]

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
    """Seconds, processor seconds, result, and growth of resident memory at its peak, of `work` in its own process."""
    gc.collect()
    gc.freeze()  # a collection in the child would copy every page that it shares with us
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
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
    rivals: dict[str, Callable[[], object]] = {
        "plain": lambda: read_all(folder, threads, plain),
        "bare": lambda: read_all(folder, threads, bare),
        "ours": lambda: stage(folder, home, threads),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in rivals}
    names = list(rivals)
    for turn in range(ROUNDS + 1):
        for name in names[turn % 3 :] + names[: turn % 3]:
            figures = in_child(rivals[name])
            shutil.rmtree(home, ignore_errors=True)
            if turn:  # the first one warms the page cache
                found[name].append(figures)
    for name, rounds in found.items():
        taken = [one["seconds"] for one in rounds]
        cpu = statistics.median(one["cpu"] for one in rounds)
        median = statistics.median(taken)
        spread = f"{min(taken):.3f} to {max(taken):.3f}"
        say(f"  {name:<6} {median:.3f} s ({spread}), processor {cpu:.3f} s, {bytes_text(total / median)}/s")
    ours = found["ours"]
    peaks = [(one["result"] + one["growth"]) / one["result"] for one in ours]
    bare_s = _ratio(found["bare"], ours, "seconds")
    say(f"  share of the bare read: {bare_s.median:.3g} ({bare_s.low:.3g} to {bare_s.high:.3g})")
    processor = _ratio(found["plain"], ours, "cpu").median
    note = f"by processor time {processor:.2f}"
    return [
        at_least(
            "staging, checked, share of plain read", _ratio(found["plain"], ours, "seconds"), SPEED_LIMIT, note=note
        ),
        at_most("peak memory of staging, share of stored bytes", _spread(peaks), MEMORY_LIMIT),
    ]


def _ratio(theirs: list[dict[str, float]], ours: list[dict[str, float]], figure: str) -> Spread:
    """How fast we are as a share of them, round by round."""
    return _spread([one[figure] / other[figure] for one, other in zip(theirs, ours, strict=True)])


def _spread(values: list[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def main() -> int:
    return report(rows(), title="staging")


if __name__ == "__main__":
    sys.exit(main())
