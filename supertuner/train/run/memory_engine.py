"""How a run uses the machine's memory: residency hints, batches in unified memory, overflow, and telemetry.

Opened once, before anything is on the device; each decision is reported with its reason. Nothing here changes computed
values: a refused hint is counted, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from supertuner.arena.run_context import RunContext
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import DecisionEvent, Sink, WarningEvent
from supertuner.core.types import bytes_text
from supertuner.memory.cuda import open_cuda
from supertuner.memory.driver import Driver, NotAvailable
from supertuner.memory.hints.api import ResidencyHints, drop_hints, use_hints, uvm_hint_override
from supertuner.memory.hints.enabled import HintDecision, HintSupport, decide_hints, hint_support
from supertuner.memory.hints.outcomes import HintStatus, HintTally
from supertuner.memory.machines import ONE_POOL_SHARE
from supertuner.memory.nvml import open_nvml
from supertuner.memory.overflow_allocator.plugin import OverflowStats
from supertuner.memory.overflow_allocator.pools import OverflowPools, open_overflow_pools
from supertuner.memory.overflow_allocator.stats import uvm_stats
from supertuner.memory.probe import MachineFacts, free_gpu_bytes, probe_machine
from supertuner.memory.telemetry.cupti import open_cupti
from supertuner.memory.telemetry.sampler import NO_CUPTI, GpuTelemetry, MemorySampler
from supertuner.memory.unified.buffers import UnifiedBuffers
from supertuner.step.batch import StepBatch


@dataclass(eq=False, slots=True)
class MemoryEngine:
    """The memory features of a run, and what became of each request."""

    facts: MachineFacts
    hint_decision: HintDecision
    """Whether hints are used, and the reason."""
    hints: ResidencyHints | None
    """None: hints are off."""
    buffers: UnifiedBuffers | None
    """Unified memory for batches; None: they are in pinned memory, or where they were made."""
    pools: OverflowPools | None
    """Allocates device tensors if GPU memory may overflow into host memory; None: overflow is off."""
    overflow_at_start: OverflowStats | None
    """The allocator's counters at the start of this run: they count as long as the process lives."""
    sampler: MemorySampler
    sample_every: int
    hint_tally: HintTally = field(default_factory=HintTally)
    reported_refusals: int = 0
    """Refused allocations and hints that `new_refusal` has reported."""

    def keep_in_host(self, address: int, nbytes: int) -> None:
        """Hint that a cache's memory stays in host memory: the GPU reads copies of it."""
        if self.hints is not None:
            self.hint_tally.add(self.hints.prefer_host_range(address, nbytes))

    def place_batch(self, batch: StepBatch) -> StepBatch:
        """Move a new batch to memory that the GPU reads without the CPU: unified (with prefetch) or pinned."""
        if self.buffers is None:
            return batch.pinned()
        tensors = list(batch.tensors())
        placed, outcome = self.buffers.place(tensors)
        self.hint_tally.add(outcome)
        if placed is None:
            return batch.pinned()
        moved = dict(zip(map(id, tensors), placed, strict=True))
        return batch.map_tensors(lambda tensor: moved[id(tensor)])

    def hint_batch(self, batch: StepBatch) -> None:
        """Give hints for a batch on the device, which the next step reads."""
        if self.hints is not None:
            self.hint_tally.add(self.hints.place_batch(batch.named_tensors()))

    def allocating(self, kind: Literal["weights", "state"]) -> AbstractContextManager[None]:
        """Inside the `with` block, allocations count as `kind`; the overflow allocator may place kinds differently."""
        return nullcontext() if self.pools is None else self.pools.allocating(kind)

    def after_step(self, step: int, sink: Sink) -> None:
        """Between two steps: return unused memory, and sample telemetry every `sample_every` steps."""
        if self.pools is not None:
            self.pools.reclaim_between_steps()
        if self.sample_every and step % self.sample_every == 0:
            self.sampler.emit(sink, step)

    def new_refusal(self) -> str | None:
        """What was refused since the last call, or None. A plan may rely on memory that was refused."""
        overflow = 0
        if self.pools is not None and self.overflow_at_start is not None:
            overflow = self.pools.stats().refusals - self.overflow_at_start.refusals
        statuses = self.hint_tally.by_status()
        hints = statuses.get(HintStatus.REFUSED.value, 0) + statuses.get(HintStatus.ERROR.value, 0)
        before, self.reported_refusals = self.reported_refusals, overflow + hints
        if self.reported_refusals == before:
            return None
        return f"memory was refused ({overflow} allocations, {hints} hints so far)"

    def out_of_memory_remedy(self, advice: str) -> str:
        """The remedy in an out-of-memory error: `advice` names settings that need less memory."""
        if self.pools is None:
            return f"{advice}, or memory.overflow.enabled: true" if _can_overflow(self.facts) else advice
        stats = self.pools.stats()
        if stats.refused_host:
            return f"{advice}; overflow is on, and the host is at its floor (memory.overflow.host_floor_gb)"
        if stats.refused_driver:
            reason = f"{stats.last_call}: error {stats.last_error}"
            return f"{advice}; overflow is on, and the driver gave it no more ({reason})"
        return f"{advice}, or raise memory.overflow.oversubscription_ratio" if stats.refused_ratio else advice

    def summary_lines(self) -> list[str]:
        """Lines for the summary at the end of the run."""
        decision = self.hint_decision
        lines = [f"hint {line}" for line in self.hint_tally.lines()] if decision.on else [str(decision)]
        if self.pools is not None and self.overflow_at_start is not None:
            lines.append(overflow_summary(self.overflow_at_start, self.pools.stats()))
        return lines


@contextmanager
def open_memory(config: RunConfig, device: torch.device, context: RunContext) -> Iterator[MemoryEngine]:
    """The memory engine of a run, to be opened before the first tensor is on the device; leaving undoes everything."""
    overflow, host, sink = config.memory.overflow, context.host, context.sink
    with ExitStack() as stack:
        driver: Driver | NotAvailable = open_cuda()
        nvml = open_nvml()
        if not isinstance(nvml, NotAvailable):
            stack.callback(nvml.close)
        facts = probe_machine(host, driver, nvml)
        stack.enter_context(_restored_memory_fraction(facts, device))
        limit_pool_use(facts, device, context)
        hint_tally = HintTally()
        decision, hints, buffers = _open_hints(config, device, driver, facts, context)
        stack.callback(drop_hints)  # `supertuner.gh200` follows this run's configuration while it lasts
        if buffers is not None:
            stack.callback(buffers.close)
        pools = None
        if overflow.enabled:
            pools = stack.enter_context(open_overflow_pools(overflow, facts, host, sink, driver=driver, device=device))
        cupti = open_cupti(device.index or 0) if hints is not None or pools is not None else NO_CUPTI
        if not isinstance(cupti, NotAvailable):
            stack.callback(cupti.close)
        telemetry = GpuTelemetry(driver, nvml, cupti, device.index or 0, device)
        figures = None if pools is None else partial(_overflow_figures, pools)
        sampler = MemorySampler(facts, host, telemetry, overflow=figures, hints=hint_tally.by_status)
        sampler, sample_every = stack.enter_context(sampler), config.report.memory_every_steps
        at_start = None if pools is None else pools.stats()
        yield MemoryEngine(facts, decision, hints, buffers, pools, at_start, sampler, sample_every, hint_tally)


def limit_pool_use(facts: MachineFacts, device: torch.device, context: RunContext) -> None:
    """On a one-pool machine, torch gets at most `ONE_POOL_SHARE` of the memory that is available now.

    A GPU with its own memory refuses what it does not have. A pool gives its last page, and then the machine stops.
    """
    available = context.host.memory_available()
    if not _shares_pool(facts, device) or available is None:
        return
    limit = torch.cuda.memory_reserved(device) + int(ONE_POOL_SHARE * available)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    reason = (
        f"CPU and GPU share one memory, of which {bytes_text(available)} are available; a full pool stops the machine"
    )
    context.sink.emit(DecisionEvent("memory.device_limit", bytes_text(min(limit, total)), reason))


@contextmanager
def _restored_memory_fraction(facts: MachineFacts, device: torch.device) -> Iterator[None]:
    if not _shares_pool(facts, device):
        yield
        return
    before = torch.cuda.get_per_process_memory_fraction(device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def _shares_pool(facts: MachineFacts, device: torch.device) -> bool:
    return device.type == "cuda" and bool(facts.one_pool)


def _open_hints(
    config: RunConfig, device: torch.device, driver: Driver | NotAvailable, facts: MachineFacts, context: RunContext
) -> tuple[HintDecision, ResidencyHints | None, UnifiedBuffers | None]:
    """Decide once whether this run gives hints; returns the decision and the objects that give them."""
    setting = config.gh200_optimizations.enable_uvm_hints
    caches = (config.cache_config.vae_cache_type, config.cache_config.text_cache_type)
    number = device.index or 0
    support = HintSupport(False, f"the run computes on {device.type}")
    if device.type == "cuda":
        support = hint_support(driver, number)
    decision = decide_hints(uvm_hint_override(), setting, caches, support)
    context.sink.emit(DecisionEvent("residency_hints", decision.on, decision.reason))
    if setting and not decision.on:
        context.sink.emit(WarningEvent("gh200_optimizations.enable_uvm_hints", f"has no effect: {decision.reason}"))
    if not decision.on or isinstance(driver, NotAvailable):
        use_hints(None, setting, caches, support)
        return decision, None, None
    free = partial(free_gpu_bytes, facts, driver, context.host, number)
    hints = ResidencyHints(driver, number, free_bytes=free)
    use_hints(hints, setting, caches, support)
    return decision, hints, UnifiedBuffers(driver, device, free_bytes=free)


def _can_overflow(facts: MachineFacts) -> bool:
    """Whether GPU and host have separate memories, and the GPU can page between them."""
    return facts.one_pool is False and any(gpu.device.concurrent_managed for gpu in facts.gpus)


def _overflow_figures(pools: OverflowPools) -> Mapping[str, int | float | str]:
    return uvm_stats(pools.stats())


def overflow_summary(before: OverflowStats, now: OverflowStats) -> str:
    """What overflowed since `before`, in one line. Peaks are those of the whole process."""
    peaks = f"at most {bytes_text(now.device_peak_bytes)} of device memory"
    if now.managed_allocations == before.managed_allocations:
        return f"overflow: not needed; {peaks}"
    light = now.light_reclamations - before.light_reclamations
    hard = now.hard_reclamations - before.hard_reclamations
    spilled = f"{bytes_text(now.managed_peak_bytes)} managed"
    refused = f", {now.refusals - before.refusals} refusals" if now.refusals > before.refusals else ""
    times = now.entered - before.entered
    often = {0: "already spilling at its start", 1: "spilling began once"}
    began = often.get(times, f"spilling began {times} times")
    return f"overflow: {peaks}, {spilled}; {began}, {light} light and {hard} hard reclamations{refused}"
