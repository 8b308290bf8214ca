"""The machine's memory as a run uses it: residency hints, batches in unified memory, overflow, and their figures.

Opened once, before anything is on the device, and told with its reasons. Nothing here changes what is computed: a hint
that is refused is counted, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from supertuner.config.settings.tree import RunConfig
from supertuner.core.events import Decided, Sink, Warned
from supertuner.core.host import Host
from supertuner.core.types import bytes_text
from supertuner.memory.cuda import open_cuda
from supertuner.memory.driver import Driver, Missing
from supertuner.memory.hints.api import (
    Enabled,
    Hints,
    Status,
    Support,
    Tally,
    decide,
    drop_hints,
    supported,
    use_hints,
    uvm_hint_override,
)
from supertuner.memory.overflow.plugin import OverflowStats
from supertuner.memory.overflow.pools import Pools, open_pools
from supertuner.memory.overflow.stats import named
from supertuner.memory.probe import Facts, free_gpu_bytes, probe
from supertuner.memory.telemetry.cupti import open_cupti
from supertuner.memory.telemetry.nvml import open_nvml
from supertuner.memory.telemetry.sampler import NO_CUPTI, Sampler
from supertuner.memory.unified import UnifiedBuffers
from supertuner.step.batch import StepBatch


@dataclass(eq=False, slots=True)
class MemoryEngine:
    """What a run asks of its machine's memory, and what became of it."""

    facts: Facts
    enabled: Enabled
    """Whether hints are asked for and can be had, and why."""
    hints: Hints | None
    """None: they are off."""
    buffers: UnifiedBuffers | None
    """Where batches wait for the GPU; None: in pinned memory, or where they are made."""
    pools: Pools | None
    """Where tensors on the device come from, if GPU memory may overflow."""
    account: OverflowStats | None
    """The allocator's account when this run began: it goes on as long as the process does."""
    sampler: Sampler
    sample_every: int
    tally: Tally = field(default_factory=Tally)
    refused_before: int = 0
    """Refusals of the allocator and of hints that `new_refusal` has told."""

    def keep_in_host(self, address: int, nbytes: int) -> None:
        """A cache's memory: the GPU reads copies of it, so it stays where it is."""
        if self.hints is not None:
            self.tally.add(self.hints.keep_in_host(address, nbytes))

    def place(self, batch: StepBatch) -> StepBatch:
        """A batch just made, put where the GPU fetches it from without the CPU; in unified memory it is on its way."""
        if self.buffers is None:
            return batch.pinned()
        tensors = list(batch.tensors())
        placed, outcome = self.buffers.place(tensors)
        self.tally.add(outcome)
        if placed is None:
            return batch.pinned()
        moved = dict(zip(map(id, tensors), placed, strict=True))
        return batch.each(lambda tensor: moved[id(tensor)])

    def about_to_use(self, batch: StepBatch) -> None:
        """Hints for a batch on the device that the next step reads."""
        if self.hints is not None:
            self.tally.add(self.hints.place_batch(batch.named()))

    def placing(self, what: Literal["weights", "state"]) -> AbstractContextManager[None]:
        """Tensors of a class that is placed in a way of its own are made inside."""
        return nullcontext() if self.pools is None else self.pools.placing(what)

    def after_step(self, step: int, sink: Sink) -> None:
        """Between two steps: memory that nothing uses goes home, and figures are taken."""
        if self.pools is not None:
            self.pools.between_steps()
        if self.sample_every and step % self.sample_every == 0:
            self.sampler.emit(sink, step)

    def new_refusal(self) -> str | None:
        """What was refused since this was asked last, if anything was: a plan may have counted on it."""
        overflow = (
            0 if self.pools is None or self.account is None else self.pools.stats().refusals - self.account.refusals
        )
        statuses = self.tally.by_status()
        hints = statuses.get(Status.REFUSED.value, 0) + statuses.get(Status.ERROR.value, 0)
        before, self.refused_before = self.refused_before, overflow + hints
        if self.refused_before == before:
            return None
        return f"memory was refused ({overflow} allocations, {hints} hints so far)"

    def remedy(self, less: str) -> str:
        """What to do where memory is full: `less` names what needs less of it."""
        if self.pools is None:
            return f"{less}, or memory.overflow.enabled: true" if _can_overflow(self.facts) else less
        account = self.pools.stats()
        if account.refused_host:
            return f"{less}; overflow is on, and the host is at its floor (memory.overflow.host_floor_gb)"
        if account.refused_driver:
            why = f"{account.last_call}: error {account.last_error}"
            return f"{less}; overflow is on, and the driver gave it no more ({why})"
        return f"{less}, or raise memory.overflow.oversubscription_ratio" if account.refused_ratio else less

    def lines(self) -> list[str]:
        """What became of it, for the summary."""
        hints = [f"hint {line}" for line in self.tally.lines()] if self.enabled.on else [str(self.enabled)]
        if self.pools is None or self.account is None:
            return hints
        return [*hints, overflow_line(self.account, self.pools.stats())]


@contextmanager
def open_memory(config: RunConfig, device: torch.device, *, host: Host, sink: Sink) -> Iterator[MemoryEngine]:
    """The engine of a run, ready before the first tensor is on the device; leaving it puts everything back."""
    overflow = config.memory.overflow
    with ExitStack() as opened:
        driver: Driver | Missing = open_cuda()
        nvml = open_nvml()
        if not isinstance(nvml, Missing):
            opened.callback(nvml.close)
        facts = probe(host, driver, nvml)
        tally = Tally()
        enabled, hints, buffers = _hints(config, device, driver, facts, host, sink)
        opened.callback(drop_hints)  # the seeds' functions follow this run's configuration as long as it lasts
        if buffers is not None:
            opened.callback(buffers.close)
        pools = None
        if overflow.enabled:
            pools = opened.enter_context(open_pools(overflow, facts, host, sink, driver=driver, device=device))
        cupti = open_cupti(device.index or 0) if hints is not None or pools is not None else NO_CUPTI
        if not isinstance(cupti, Missing):
            opened.callback(cupti.close)
        sampler = opened.enter_context(
            Sampler(
                facts,
                host,
                driver,
                nvml,
                cupti,
                device=device.index or 0,
                torch_device=device,
                overflow=None if pools is None else partial(_account, pools),
                hints=tally.by_status,
            )
        )
        yield MemoryEngine(
            facts=facts,
            enabled=enabled,
            hints=hints,
            buffers=buffers,
            pools=pools,
            account=None if pools is None else pools.stats(),
            sampler=sampler,
            sample_every=config.report.memory_every_steps,
            tally=tally,
        )


def _hints(
    config: RunConfig, device: torch.device, driver: Driver | Missing, facts: Facts, host: Host, sink: Sink
) -> tuple[Enabled, Hints | None, UnifiedBuffers | None]:
    """Whether this run hints, decided once; and with what."""
    setting = config.gh200_optimizations.enable_uvm_hints
    caches = (config.cache_config.vae_cache_type, config.cache_config.text_cache_type)
    number = device.index or 0
    can = supported(driver, number) if device.type == "cuda" else Support(False, f"the run computes on {device.type}")
    enabled = decide(uvm_hint_override(), setting, caches, can)
    sink.emit(Decided("residency_hints", enabled.on, enabled.reason))
    if setting and not enabled.on:
        sink.emit(Warned("gh200_optimizations.enable_uvm_hints", f"has no effect: {enabled.reason}"))
    if not enabled.on or isinstance(driver, Missing):
        use_hints(None, setting, caches, can)
        return enabled, None, None
    free = partial(free_gpu_bytes, facts, driver, host, number)
    hints = Hints(driver, number, free_bytes=free)
    use_hints(hints, setting, caches, can)
    return enabled, hints, UnifiedBuffers(driver, device, free_bytes=free)


def _can_overflow(facts: Facts) -> bool:
    """Whether there is a second memory to spill to."""
    return facts.one_pool is False and any(gpu.device.concurrent_managed for gpu in facts.gpus)


def _account(pools: Pools) -> Mapping[str, int | float | str]:
    return named(pools.stats())


def overflow_line(before: OverflowStats, now: OverflowStats) -> str:
    """What overflowed since `before`. Peaks are the process's."""
    peaks = f"at most {bytes_text(now.device_peak_bytes)} of device memory"
    if now.managed_allocations == before.managed_allocations:
        return f"overflow: not needed; {peaks}"
    light, hard = (
        now.light_reclamations - before.light_reclamations,
        now.hard_reclamations - before.hard_reclamations,
    )
    spilled = f"{bytes_text(now.managed_peak_bytes)} managed"
    refused = f", {now.refusals - before.refusals} refusals" if now.refusals > before.refusals else ""
    times = now.entered - before.entered
    often = {0: "already spilling at its start", 1: "spilling began once"}
    began = often.get(times, f"spilling began {times} times")
    return f"overflow: {peaks}, {spilled}; {began}, {light} light and {hard} hard reclamations{refused}"
