"""Page accesses per second of the software superchip, compared with numpy's speed of the array update they need.

The machine is a full-size GH200: 96 GiB, 1.5 million pages of 64 KiB. An access is a page that the model moves or finds
in place, including accounting, eviction order and clock. The upper bound for any model in numpy is one read and write
of the state of as many pages. Beyond the size of GPU memory, every block that arrives evicts another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import (
    ClaimRow,
    FigureSpread,
    RivalTiming,
    at_least,
    at_most,
    interleave,
    noted,
    paired,
    report,
    say,
)
from supertuner.memory.driver import HOST, AddressRange, GpuLocation, MemoryKind
from supertuner.memory.emulator.superchip import EmulatedSuperchip
from supertuner.memory.machines import MACHINES

PAGE = 65536
GPU = GpuLocation(0)
ROUNDS = 11
WITHIN_BYTES = 80 << 30
BEYOND_BYTES = 120 << 30
TENSOR_BYTES = 64 << 20
BLOCK_BYTES = 2 << 20
TOUCHES_A_SECOND = 1.0
"""In millions."""
MADE_MS = 10.0


def rows() -> list[ClaimRow]:
    made = interleave({"made": make}, ROUNDS)["made"]
    found = [at_most("software superchip: creating a full-size GH200", spread(made, 1e3), MADE_MS, unit="ms")]
    found += compare("first use of fresh pages", WITHIN_BYTES, fresh)
    found += compare("use of resident pages", WITHIN_BYTES, there)
    found += compare("prefetch home and back", 2 * WITHIN_BYTES, to_and_fro)
    found += compare("a sweep beyond the GPU, all evicted", BEYOND_BYTES, beyond)
    found += compare("a sweep beyond the GPU by tensors of 64 MiB", BEYOND_BYTES, by_tensors)
    return [*found, small_pieces()]


def small_pieces() -> ClaimRow:
    """One call per block: the cost of a call dominates, not that of a page. Without a limit."""
    model, span = managed(BEYOND_BYTES)
    model.touch(span, GPU)
    parts = [AddressRange(at, BLOCK_BYTES) for at in range(span.address, span.address + (8 << 30), BLOCK_BYTES)]

    def play() -> None:
        for part in parts:
            model.touch(part, GPU)
        model.touch(AddressRange(span.address + (8 << 30), span.nbytes - (8 << 30)), GPU)  # evicts them again

    def rest() -> None:
        model.touch(AddressRange(span.address + (8 << 30), span.nbytes - (8 << 30)), GPU)

    timings = interleave({"both": play, "rest": rest}, ROUNDS)
    taken = [b - r for b, r in zip(timings["both"].rounds_s, timings["rest"].rounds_s, strict=True)]
    rates = sorted((8 << 30) // PAGE / seconds / 1e6 for seconds in taken)
    figure = FigureSpread(rates[len(rates) // 2], rates[0], rates[-1])
    return noted("beyond the GPU by single blocks of 2 MiB, million accesses per second", figure, unit="M/s")


def make() -> EmulatedSuperchip:
    model = EmulatedSuperchip(MACHINES["gh200-96"])
    model.allocate(MemoryKind.MANAGED, WITHIN_BYTES)
    return model


def managed(nbytes: int) -> tuple[EmulatedSuperchip, AddressRange]:
    model = EmulatedSuperchip(MACHINES["gh200-96"])
    return model, AddressRange(model.allocate(MemoryKind.MANAGED, nbytes), nbytes)


def fresh() -> Callable[[], None]:
    def play() -> None:
        model, span = managed(WITHIN_BYTES)
        model.touch(span, GPU, write=True)

    return play


def there() -> Callable[[], None]:
    model, span = managed(WITHIN_BYTES)
    model.touch(span, GPU)
    return lambda: model.touch(span, GPU)


def to_and_fro() -> Callable[[], None]:
    model, span = managed(WITHIN_BYTES)
    model.touch(span, GPU)

    def play() -> None:
        model.prefetch([span], HOST)
        model.prefetch([span], GPU)

    return play


def beyond() -> Callable[[], None]:
    model, span = managed(BEYOND_BYTES)
    model.touch(span, GPU)

    def play() -> None:
        before = model.traffic.to_device_bytes
        model.touch(span, GPU)
        assert model.traffic.to_device_bytes - before == BEYOND_BYTES, "least recently used misses every page"

    return play


def by_tensors() -> Callable[[], None]:
    model, span = managed(BEYOND_BYTES)
    parts = [AddressRange(at, TENSOR_BYTES) for at in range(span.address, span.end, TENSOR_BYTES)]

    def play() -> None:
        for part in parts:
            model.touch(part, GPU)

    return play


def raw(pages: int) -> Callable[[], None]:
    """Read, change and write the state of each page: the lower bound of an access."""
    state = np.zeros(pages, np.uint8)

    def play() -> None:
        np.bitwise_or(state, 2, out=state)

    return play


def compare(name: str, nbytes: int, begin: Callable[[], Callable[[], None]]) -> list[ClaimRow]:
    pages = nbytes // PAGE
    timings = interleave({"model": begin(), "numpy": raw(pages)}, ROUNDS)
    ours = timings["model"]
    say(f"{name}: {pages:,} pages in {ours}; numpy's update alone {timings['numpy']}")
    rate = FigureSpread(*(pages / seconds / 1e6 for seconds in (ours.median_s, ours.high_s, ours.low_s)))
    return [
        at_least(f"software superchip: {name}, million page accesses per second", rate, TOUCHES_A_SECOND, unit="M/s"),
        noted(f"{name}, share of numpy's update", paired(timings["numpy"], ours)),
    ]


def spread(timing: RivalTiming, scale: float) -> FigureSpread:
    return FigureSpread(timing.median_s * scale, timing.low_s * scale, timing.high_s * scale)


def main() -> int:
    return report(rows(), title="the software superchip")


if __name__ == "__main__":
    raise SystemExit(main())
