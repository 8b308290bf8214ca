"""Times rivals in interleaved rounds and prints ratios with their spread; a claim is a row with a limit, met or missed.

A benchmark file has `rows() -> list[ClaimRow]`, which does the work, and `main() -> int`, which is `return
report(rows())`:

    def rows() -> list[ClaimRow]:
        timings = interleave({"ours": ours, "memcpy": memcpy}, rounds=15)
        return [at_least("gather, share of memcpy", paired(timings["memcpy"], timings["ours"]), 0.80)]

Speed on a shared machine varies by 10 %. Therefore rivals take turns inside each round, ratios are formed within a
round (where both had the same machine load), and the median of those ratios is reported with the lowest and the
highest.
"""

from __future__ import annotations

import contextlib
import gc
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RivalTiming:
    """The wall-clock seconds of each round of one rival."""

    rounds_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.rounds_s)

    @property
    def low_s(self) -> float:
        return min(self.rounds_s)

    @property
    def high_s(self) -> float:
        return max(self.rounds_s)

    def __str__(self) -> str:
        return f"{seconds_text(self.median_s)} ({seconds_text(self.low_s)} to {seconds_text(self.high_s)})"


@dataclass(frozen=True, slots=True)
class FigureSpread:
    """The median of a figure over the rounds, with the lowest and the highest."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """One claim: a figure, its limit, and whether it is met; `met` is None without a limit or if not measured."""

    name: str
    ratio: float
    limit: float
    met: bool | None
    unit: str = "×"
    at_most: bool = False
    """The figure must stay below the limit (memory, milliseconds) instead of reaching it."""
    spread: tuple[float, float] | None = None
    note: str = ""


def interleave(
    rivals: Mapping[str, Callable[[], object]], rounds: int = 11, *, warmup: int = 1
) -> dict[str, RivalTiming]:
    """Time every rival once per round. The order rotates, so that no rival always runs after the same one."""
    names = list(rivals)
    for _ in range(warmup):
        for name in names:
            rivals[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with _collector_off():
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                begin = time.perf_counter()
                rivals[name]()
                seconds[name].append(time.perf_counter() - begin)
            gc.collect()
    return {name: RivalTiming(tuple(taken)) for name, taken in seconds.items()}


def paired(slow: RivalTiming, fast: RivalTiming, scale: float = 1.0) -> FigureSpread:
    """How many times as fast `fast` is as `slow`, per round. `scale` is the work of `fast` per work of `slow`."""
    ratios = [scale * s / f for s, f in zip(slow.rounds_s, fast.rounds_s, strict=True)]
    return FigureSpread(statistics.median(ratios), min(ratios), max(ratios))


def at_least(name: str, figure: FigureSpread | float, limit: float, *, unit: str = "×", note: str = "") -> ClaimRow:
    value, spread = _split(figure)
    return ClaimRow(name, value, limit, value >= limit, unit, False, spread, note)


def at_most(name: str, figure: FigureSpread | float, limit: float, *, unit: str = "×", note: str = "") -> ClaimRow:
    value, spread = _split(figure)
    return ClaimRow(name, value, limit, value <= limit, unit, True, spread, note)


def noted(name: str, figure: FigureSpread | float, *, unit: str = "×", note: str = "") -> ClaimRow:
    """A figure without a limit, for the record."""
    value, spread = _split(figure)
    return ClaimRow(name, value, float("nan"), None, unit, False, spread, note)


def skipped(name: str, limit: float, reason: str) -> ClaimRow:
    """A claim that cannot be measured on this machine; it counts as neither met nor missed."""
    return ClaimRow(name, float("nan"), limit, None, note=reason)


def report(rows: Sequence[ClaimRow], title: str = "") -> int:
    """Print the table of claims. Returns the exit code: 1 if a claim was missed."""
    out = sys.stdout
    if title:
        out.write(f"\n{title}\n")
    width = max([len(row.name) for row in rows] + [5])
    out.write(f"{'claim':<{width}}  {'figure':>10}  {'limit':>10}  {'lowest to highest':>19}  met\n")
    for row in rows:
        out.write(f"{row.name:<{width}}  {_line(row)}\n")
    missed = sum(row.met is False for row in rows)
    not_measured = sum(math.isnan(row.ratio) for row in rows)
    tail = f", {not_measured} not measured" if not_measured else ""
    out.write(f"{sum(row.met is True for row in rows)} met, {missed} missed{tail}\n")
    out.flush()
    return 1 if missed else 0


def say(line: str) -> None:
    """Print a line of detail while a benchmark runs."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def seconds_text(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _line(row: ClaimRow) -> str:
    sign = "≤" if row.at_most else "≥"
    limit = "none" if math.isnan(row.limit) else f"{sign} {row.limit:.3g} {row.unit}"
    if math.isnan(row.ratio):
        return f"{'-':>10}  {limit:>10}  {'':>19}  not measured: {row.note}"
    spread = f"{row.spread[0]:.3g} to {row.spread[1]:.3g}" if row.spread else ""
    verdict = {True: "yes", False: "NO", None: "-"}[row.met]
    note = f"  {row.note}" if row.note else ""
    return f"{f'{row.ratio:.3g} {row.unit}':>10}  {limit:>10}  {spread:>19}  {verdict}{note}"


def _split(figure: FigureSpread | float) -> tuple[float, tuple[float, float] | None]:
    if isinstance(figure, FigureSpread):
        return figure.median, (figure.low, figure.high)
    return float(figure), None


@contextlib.contextmanager
def in_memory_folder() -> Iterator[Path]:
    """A folder on tmpfs that is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="supertuner-bench-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """Disable garbage collection, which would be charged to the rival in whose turn it happens."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
