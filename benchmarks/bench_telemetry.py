"""The cost of memory telemetry: one sample, one event with its sinks, and its share of a run with 50 ms steps.

It reads the kernel files of this machine. The cost of NVML and CUPTI on a GPU is unknown here; the last row stands for
them with a source that takes 5 ms, which the rate limit must call rarely.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.harness import ClaimRow, FigureSpread, at_most, in_memory_folder, noted, report, say, seconds_text
from supertuner.core.events import Event, NullSink, TeeSink
from supertuner.core.host import HostFacts
from supertuner.memory.driver import NotAvailable
from supertuner.memory.probe import probe_machine
from supertuner.memory.telemetry.sampler import GpuTelemetry, MemorySampler
from supertuner.sinks.jsonlines import JsonLinesFile
from supertuner.sinks.tensorboard import TensorBoardSink

STEP_S = 0.05
LIMIT_PERCENT = 0.5
ROUNDS, CALLS, STEPS = 15, 200, 60
SLOW_S = 0.005
MISSING = NotAvailable("no GPU in this benchmark")


def sampler(hints: Callable[[], Mapping[str, int]] | None = None) -> MemorySampler:
    host = HostFacts()
    return MemorySampler(probe_machine(host, MISSING, MISSING), host, GpuTelemetry(MISSING, MISSING), hints=hints)


def each_s(act: Callable[[int], object], calls: int) -> float:
    begin = time.perf_counter()
    for number in range(calls):
        act(number)
    return (time.perf_counter() - begin) / calls


def percent(seconds: list[float]) -> FigureSpread:
    """Seconds as percent of a step: the median and the range over the rounds."""
    shares = sorted(100 * s / STEP_S for s in seconds)
    return FigureSpread(shares[len(shares) // 2], shares[0], shares[-1])


def one_sample() -> ClaimRow:
    with sampler() as ours:
        ours.sample()
        figure = percent([each_s(lambda _: ours.sample(), CALLS) for _ in range(ROUNDS)])
        say(f"a sample of {len(ours.sample())} figures takes {seconds_text(figure.median / 100 * STEP_S)}")
    return at_most("one telemetry sample, share of a step of 50 ms", figure, LIMIT_PERCENT, unit="%")


def one_event(folder: Path) -> ClaimRow:
    """One event without the rate limit, which does not apply to the first event of a sampler."""
    with JsonLinesFile(folder / "events.jsonl") as events, TensorBoardSink(folder / "board") as board:
        sink, seconds = TeeSink(events, board), []
        for step in range(ROUNDS * 2):
            with sampler() as ours:
                ours.sample()
                begin = time.perf_counter()
                ours.emit(sink, step)
                seconds.append(time.perf_counter() - begin)
    return noted("… with its JSON line and its scalars, share of one 50 ms step", percent(seconds[2:]), unit="%")


class TimedSink:
    """A sink that passes events on and adds up the time of telemetry."""

    def __init__(self, ours: MemorySampler, sink: TeeSink | NullSink) -> None:
        self._ours, self._sink = ours, sink
        self.seconds, self.events = 0.0, 0

    def step(self, number: int) -> None:
        begin = time.perf_counter()
        self._ours.emit(self, number)
        self.seconds += time.perf_counter() - begin
        time.sleep(STEP_S)

    def emit(self, event: Event, /) -> None:
        self.events += 1
        self._sink.emit(event)


def whole_run(name: str, ours: MemorySampler, sink: TeeSink | NullSink, steps: int) -> ClaimRow:
    """Steps that only sleep, with telemetry after each; the first event, which is not rate-limited, is not counted."""
    ours.emit(sink, 0)
    spent = TimedSink(ours, sink)
    taken = each_s(lambda number: spent.step(number + 1), steps) * steps
    say(f"{name}: {spent.events} events in {steps} steps")
    return at_most(name, 100 * spent.seconds / taken, LIMIT_PERCENT, unit="%", note=f"{spent.events}/{steps} steps")


def slow_source() -> dict[str, int]:
    time.sleep(SLOW_S)
    return {"applied": 1}


def rows() -> list[ClaimRow]:
    found = [one_sample()]
    with in_memory_folder() as folder:
        found.append(one_event(folder))
        with JsonLinesFile(folder / "run.jsonl") as events, TensorBoardSink(folder / "run") as board, sampler() as ours:
            sink = TeeSink(events, board)
            found.append(whole_run("telemetry with its sinks, share of a run of 50 ms steps", ours, sink, STEPS))
    with sampler(hints=slow_source) as slow:
        found.append(whole_run("… with a source that takes 5 ms", slow, NullSink(), 2 * STEPS))
    return found


def main() -> int:
    return report(rows())


if __name__ == "__main__":
    raise SystemExit(main())
