"""The overhead of the overflow allocator over the driver, with 10, 1,000 and 100,000 live segments.

A C program times pairs of allocation and free, by the fake driver alone and by the plugin on top of it, alternating
inside each round. The fake driver of the tests is much faster than a GPU's driver, so the ratio is not that of a GPU;
the difference is the plugin's own cost: its accounting, its table of segments, and the query of free memory.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from pathlib import Path

from benchmarks.harness import ClaimRow, FigureSpread, at_most, noted, report, skipped
from tests.fakes.fake_libraries import environment

LIVE = (10, 1_000, 100_000)
ROUNDS = 15
PAIRS = 4_000
LIMIT_US = 2.0
FLAT_LIMIT_US = 0.5
"""How much more a call may cost with 100,000 live segments than with 10."""
PROGRAM = Path(__file__).with_suffix(".c")


def built(folder: Path) -> Path:
    program = folder / "bench_allocator"
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run(["cc", *flags, "-o", str(program), str(PROGRAM), "-ldl"], check=True)
    return program


def rounds_of(program: Path, live: int, managed: bool) -> list[tuple[float, float]]:
    """(nanoseconds of a pair by the driver, by the plugin) of each round."""
    command = [str(program), str(live), str(ROUNDS), str(PAIRS), str(int(managed))]
    env = environment(hbm_bytes=96 << 30)
    output = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    return [(float(line.split()[0]), float(line.split()[1])) for line in output.splitlines()]


def spread(figures: list[float]) -> FigureSpread:
    return FigureSpread(statistics.median(figures), min(figures), max(figures))


def rows() -> list[ClaimRow]:
    try:
        return _rows()
    except FileNotFoundError as error:
        return [skipped("allocator, time over the driver's own", LIMIT_US, f"no C compiler: {error.filename}")]


def _rows() -> list[ClaimRow]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        program = built(Path(folder))
        for managed in (False, True):
            kind, own = "managed" if managed else "device", {}
            for live in LIVE:
                pairs = rounds_of(program, live, managed)
                over_us = [(plugin - driver) / 1e3 / 2 for driver, plugin in pairs]
                own[live] = statistics.median(over_us)
                name = f"overflow allocator, {kind} memory, {live:,} live segments: a call beyond the driver's own"
                found.append(at_most(name, spread(over_us), LIMIT_US, unit="µs"))
                found.append(noted(f"… {live:,} live: a pair of calls by plugin / by driver", _ratio(pairs)))
            grown_us = own[LIVE[-1]] - own[LIVE[0]]
            name = f"overflow allocator, {kind} memory, {LIVE[-1]:,} live segments compared with {LIVE[0]}, a call"
            found.append(at_most(name, grown_us, FLAT_LIMIT_US, unit="µs"))
    return found


def _ratio(pairs: list[tuple[float, float]]) -> FigureSpread:
    return spread([plugin / driver for driver, plugin in pairs])


def main() -> int:
    return report(rows(), title="allocator")


if __name__ == "__main__":
    raise SystemExit(main())
