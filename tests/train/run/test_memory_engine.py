"""A run's memory engine on a machine without a GPU: what it cannot do is reported with the reason, without effect."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import cast

import pytest
import torch

from supertuner.arena.run_context import RunContext
from supertuner.config.sources.load import load_config
from supertuner.core.errors import MemoryEngineError
from supertuner.core.events import DecisionEvent, Event, MeasurementEvent, NullSink, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.memory.hints.api import gh200_uvm_enabled, set_uvm_hint_override
from supertuner.memory.hints.outcomes import HintOutcome, HintStatus
from supertuner.memory.overflow_allocator.plugin import OverflowStats
from supertuner.memory.overflow_allocator.pools import OverflowPools
from supertuner.step.batch import StepBatch
from supertuner.train.run.memory_engine import MemoryEngine, open_memory, overflow_summary
from tests.train.runs import TrainingForkServer, config

CPU = torch.device("cpu")


class RecordingSink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event, /) -> None:
        self.events.append(event)


def opened(tmp_path: Path, **blocks: object) -> tuple[RecordingSink, object]:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(blocks))
    sink = RecordingSink()
    return sink, open_memory(load_config(file).config, CPU, RunContext(tmp_path, sink, NullSink(), HostFacts()))


def account(**counts: int | str) -> OverflowStats:
    """The plugin's counters: zero except for these."""
    empty: dict[str, int | str] = {field.name: 0 for field in fields(OverflowStats)}
    return OverflowStats(**{**empty, "last_call": "", **counts})  # type: ignore[arg-type]


@dataclass
class PoolsStub:
    """Pools that only have counters."""

    overflow_stats: OverflowStats

    def stats(self) -> OverflowStats:
        return self.overflow_stats


def test_hints_are_off_and_the_reason_is_reported_once(tmp_path: Path) -> None:
    sink, engine = opened(tmp_path)
    with engine as memory:
        assert isinstance(memory, MemoryEngine)
        assert memory.hints is None and memory.buffers is None and memory.pools is None
        assert memory.summary_lines() == [
            "residency hints off: a cache of type unified_memory requests them, but the run computes on cpu"
        ]
        assert not gh200_uvm_enabled(), "the seeds' function says the same"
    decided = [event for event in sink.events if isinstance(event, DecisionEvent)]
    assert [(one.what, one.value) for one in decided] == [("residency_hints", False)]
    assert not any(isinstance(event, WarningEvent) for event in sink.events), "nobody asked for them in so many words"


def test_requested_hints_that_are_unavailable_cause_a_warning(tmp_path: Path) -> None:
    sink, engine = opened(tmp_path, gh200_optimizations={"enable_uvm_hints": True})
    with engine:
        pass
    (warned,) = (event for event in sink.events if isinstance(event, WarningEvent))
    assert warned.what == "gh200_optimizations.enable_uvm_hints"
    assert warned.message.endswith("but the run computes on cpu")


def test_the_override_in_code_takes_precedence_over_the_configuration(tmp_path: Path) -> None:
    set_uvm_hint_override(False)
    try:
        _, engine = opened(tmp_path, gh200_optimizations={"enable_uvm_hints": True})
        with engine as memory:
            assert memory.summary_lines() == ["residency hints off: set_uvm_hint_override(False)"]
    finally:
        set_uvm_hint_override(None)


def test_overflow_on_a_cpu_is_refused_with_the_remedy(tmp_path: Path) -> None:
    _, engine = opened(tmp_path, memory={"overflow": {"enabled": True}})
    with pytest.raises(MemoryEngineError, match=r"memory\.overflow.*cpu.*set memory\.overflow\.enabled to false"):
        engine.__enter__()


def test_each_refusal_is_reported_once(tmp_path: Path) -> None:
    _, engine = opened(tmp_path)
    with engine as memory:
        assert memory.new_refusal() is None
        memory.hint_tally.add(HintOutcome(HintStatus.REFUSED, "CUDA_ERROR_INVALID_VALUE"))
        memory.hint_tally.add(HintOutcome(HintStatus.APPLIED, "read back as requested"))
        assert memory.new_refusal() == "memory was refused (0 allocations, 1 hints so far)"
        assert memory.new_refusal() is None
        memory.overflow_at_start, memory.pools = account(refused_ratio=1), PoolsStub(account(refused_ratio=3))
        assert "2 allocations" in memory.new_refusal()


def test_telemetry_is_sampled_every_n_steps_with_the_figures_of_this_machine(tmp_path: Path) -> None:
    sink, engine = opened(tmp_path, report={"memory_every_steps": 2})
    with engine as memory:
        for step in range(1, 3):
            memory.after_step(step, sink)
    (figures,) = (event.figures for event in sink.events if isinstance(event, MeasurementEvent))
    assert figures["step"] == 2
    assert not [name for name in figures if name.startswith(("gpu.", "torch.", "uvm", "nvml.", "cupti."))]
    sink, engine = opened(tmp_path, report={"memory_every_steps": 0})
    with engine as memory:
        memory.after_step(10, sink)
    assert not any(isinstance(event, MeasurementEvent) for event in sink.events)


def test_without_hints_caches_and_batches_are_unchanged(tmp_path: Path) -> None:
    _, engine = opened(tmp_path)
    with engine as memory:
        memory.keep_in_host(4096, 4096)
        memory.hint_batch(StepBatch(torch.ones(1), torch.ones(1), torch.ones(1), {}, {}))
        assert memory.hint_tally.lines() == []
        assert memory.out_of_memory_remedy("lower train.batch_size") == "lower train.batch_size"


@pytest.mark.parametrize(
    ("counts", "remedy"),
    [
        ({"refused_ratio": 2}, "less, or raise memory.overflow.oversubscription_ratio"),
        ({"refused_host": 2}, "less; overflow is on, and the host is at its floor (memory.overflow.host_floor_gb)"),
        (
            {"refused_driver": 2, "last_call": "cuMemAllocManaged", "last_error": 2},
            "less; overflow is on, and the driver gave it no more (cuMemAllocManaged: error 2)",
        ),
        ({}, "less"),
    ],
)
def test_the_remedy_says_why_overflow_did_not_help(tmp_path: Path, counts: dict[str, int | str], remedy: str) -> None:
    _, engine = opened(tmp_path)
    with engine as memory:
        memory.pools = cast(OverflowPools, PoolsStub(account(**counts)))
        assert memory.out_of_memory_remedy("less") == remedy


def test_the_summary_counts_how_often_spilling_began() -> None:
    nothing = account()
    once = account(managed_allocations=3, entered=1, device_peak_bytes=1 << 30, managed_peak_bytes=1 << 31)
    line = "overflow: at most 1.0 GiB of device memory, 2.0 GiB managed; spilling began {}, 0 light and 0 hard"
    assert overflow_summary(nothing, once).startswith(line.format("once"))
    assert overflow_summary(nothing, replace(once, entered=2)).startswith(line.format("2 times"))
    assert "; already spilling at its start, 0 light" in overflow_summary(account(entered=1), once)
    assert overflow_summary(once, once) == "overflow: not needed; at most 1.0 GiB of device memory"


def test_a_run_records_the_decision_and_prints_it_at_the_end(parent: TrainingForkServer, tmp_path: Path) -> None:
    file = config(tmp_path, "plain", train={"max_steps": 2}, validation={"at_start": False, "at_end": False})
    assert parent.train(file) == 0, parent.output()
    assert "  memory       residency hints off: " in parent.output()
    decisions = json.loads((tmp_path / "plain" / "run" / "decisions.json").read_text())
    assert "residency_hints" in json.dumps(decisions)
