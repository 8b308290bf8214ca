"""Simulates a step with everything in managed memory and without prefetch, on the emulated superchip. Modelled.

Each pass of a block touches its weights, activations and temporaries. What is not on the GPU faults and is copied in,
the least recently used pages are evicted for it, and the pass waits, as it waits for its data in `simulate.py`. The
model favours paging: touching resident memory costs nothing; activations are kept or recomputed, whichever is faster;
and freed memory is either returned to the driver, which drops it and faults it in again, or kept by a caching
allocator, which faults once but whose free pages are evicted like others, whichever is faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.plan_replay import PAGE_BYTES
from supertuner.memory.driver import HOST, AddressRange, DriverError, GpuLocation, MemoryAdvice, MemoryKind
from supertuner.memory.emulator.configuration import EmulatorParameters
from supertuner.memory.emulator.superchip import EmulatedSuperchip
from supertuner.memory.machines import MachineSpec
from supertuner.plan.placement.choice import TimedStep
from supertuner.plan.placement.plan import ActivationPolicy
from supertuner.plan.placement.throughput import MemoryLimits, emulator_figures

GPU = GpuLocation(0)
SIMULATED_MICRO_BATCHES = 2
"""Micro-batches of a window that are simulated; further ones take as long as the last of these."""


@dataclass(frozen=True, slots=True)
class PagedWindow:
    """Modelled times of one window in the steady state."""

    seconds: float
    link_s: float
    """Time in which the link was busy."""
    activations: ActivationPolicy
    """The policy of all recomputable blocks."""


def simulate_paging(
    step: TimedStep, machine: MachineSpec, limits: MemoryLimits, *, batch_on_host: bool = False
) -> PagedWindow | None:
    """The fastest combination of keeping or recomputing activations, with or without a caching allocator. None: both
    memories together are too small.

    `batch_on_host`: the batch is kept in host memory and read there, as in the GH200 forks.
    """
    simulated_windows = []
    for policy, caching in product((ActivationPolicy.KEEP, ActivationPolicy.RECOMPUTE), (False, True)):
        try:
            simulated_windows.append(_PagingSimulator(step, machine, limits, policy, batch_on_host, caching).simulate())
        except DriverError:
            continue  # this combination exceeds both memories; another may fit
    return min(simulated_windows, key=lambda paged: paged.seconds, default=None)


class _PagingSimulator:
    def __init__(
        self,
        step: TimedStep,
        machine: MachineSpec,
        limits: MemoryLimits,
        policy: ActivationPolicy,
        batch_on_host: bool,
        caching: bool,
    ) -> None:
        self._step, self._policy, self._caching = step, policy, caching
        self._cached_spans: dict[int, list[AddressRange]] = {}
        """Free ranges that the caching allocator keeps, by size."""
        self._scratch_span: AddressRange | None = None
        figures = emulator_figures(machine.title, step.rates, limits, ats=machine.ats)
        figures = replace(figures, gpu_read_bytes_s=math.inf, gpu_write_bytes_s=math.inf, host_bytes_s=math.inf)
        # A batch of page faults has the same bytes for every page size.
        pages = EmulatorParameters().fault_batch_pages * 65536 // PAGE_BYTES
        parameters = EmulatorParameters(fault_batch_pages=pages, duplex=step.rates.duplex)
        self._chip = EmulatedSuperchip(figures, page_bytes=PAGE_BYTES, parameters=parameters)
        blocks = step.table.blocks
        self._weights = [self._allocate_filled(b.frozen_bytes) for b in blocks]
        self._trained = [self._allocate_filled(b.trained_bytes) for b in blocks]
        self._state = [self._allocate_filled(b.state_bytes) for b in blocks]
        self._idle = self._allocate_filled(step.table.idle_bytes)
        self._batch = self._allocate_filled(step.table.batch_bytes)
        if batch_on_host and self._batch is not None and not step.rates.one_pool:
            self._chip.advise(self._batch, MemoryAdvice.PREFERRED_LOCATION, HOST)
        self._gradients: list[AddressRange | None] = [None] * len(blocks)
        self._saved: list[AddressRange | None] = [None] * len(blocks)

    def simulate(self) -> PagedWindow:
        self._run_window()
        begin, busy = self._chip.clock.now, self._link_busy_s()
        extra = self._run_window()
        return PagedWindow(self._chip.clock.now - begin + extra, self._link_busy_s() - busy, self._policy)

    def _run_window(self) -> float:
        """Simulates one window. Returns the seconds of the micro-batches that were not simulated."""
        count, micro = len(self._weights), self._step.table.micro_batches
        last = 0.0
        for _ in range(min(micro, SIMULATED_MICRO_BATCHES)):
            begin = self._chip.clock.now
            self._touch([self._batch])
            for block in range(count):
                self._forward(block)
            for block in reversed(range(count)):
                self._backward(block)
            last = self._chip.clock.now - begin
        for block in range(count):
            self._update(block)
        return last * max(0, micro - SIMULATED_MICRO_BATCHES)

    def _forward(self, block: int) -> None:
        step, table = self._step, self._step.table.blocks[block]
        recomputed = self._is_recomputed(block)
        self._saved[block] = self._allocate(step.input_bytes[block] if recomputed else step.saved_bytes[block])
        transient = table.forward_peak_bytes + (step.saved_bytes[block] - step.input_bytes[block] if recomputed else 0)
        self._touch([self._weights[block], self._trained[block]])
        self._compute(transient, [self._saved[block]], step.forward_s[block])

    def _backward(self, block: int) -> None:
        step, table = self._step, self._step.table.blocks[block]
        recomputed = self._is_recomputed(block)
        transient = table.backward_peak_bytes + (step.saved_bytes[block] - step.input_bytes[block] if recomputed else 0)
        self._touch([self._weights[block], self._trained[block], self._saved[block]])
        if self._gradients[block] is None:
            self._gradients[block] = self._allocate(step.gradient_bytes[block])
        recompute_s = step.forward_s[block] if recomputed else 0.0
        self._compute(transient, [self._gradients[block]], recompute_s + step.backward_s[block])
        self._drop(self._saved, block)

    def _update(self, block: int) -> None:
        step = self._step
        self._touch([self._trained[block], self._gradients[block], self._state[block]], write=True)
        self._chip.compute(step.update_s * step.update_shares[block])
        self._drop(self._gradients, block)

    def _is_recomputed(self, block: int) -> bool:
        return self._policy is ActivationPolicy.RECOMPUTE and self._step.table.blocks[block].recomputable

    def _compute(self, transient: int, written: Sequence[AddressRange | None], seconds: float) -> None:
        space = self._scratch(transient) if self._caching else self._allocate(transient)
        self._touch([space, *written], write=True)
        self._chip.compute(seconds)
        if not self._caching:
            self._free(space)

    def _touch(self, spans: Sequence[AddressRange | None], write: bool = False) -> None:
        for span in spans:
            if span is not None:
                self._chip.touch(span, GPU, write=write)

    def _allocate_filled(self, nbytes: int) -> AddressRange | None:
        """Managed memory that the host has written."""
        span = self._allocate(nbytes)
        if span is not None:
            self._chip.touch(span, HOST, write=True)
        return span

    def _allocate(self, nbytes: int) -> AddressRange | None:
        if self._cached_spans.get(nbytes):
            return self._cached_spans[nbytes].pop()
        return AddressRange(self._chip.allocate(MemoryKind.MANAGED, nbytes), nbytes) if nbytes else None

    def _scratch(self, nbytes: int) -> AddressRange | None:
        """The first `nbytes` of one range that all temporaries share."""
        if self._scratch_span is None:
            blocks = self._step.table.blocks
            largest = max(b.saved_bytes + max(b.forward_peak_bytes, b.backward_peak_bytes) for b in blocks)
            self._scratch_span = self._allocate(largest)
        return None if self._scratch_span is None or not nbytes else AddressRange(self._scratch_span.address, nbytes)

    def _free(self, span: AddressRange | None) -> None:
        if span is None:
            return
        if self._caching:
            self._cached_spans.setdefault(span.nbytes, []).append(span)
        else:
            self._chip.free(span.address)

    def _drop(self, spans: list[AddressRange | None], block: int) -> None:
        self._free(spans[block])
        spans[block] = None

    def _link_busy_s(self) -> float:
        rates, traffic = self._step.rates, self._chip.traffic
        up = traffic.to_device_bytes / rates.to_device_bytes_s if rates.to_device_bytes_s else 0.0
        return up + (traffic.to_host_bytes / rates.to_host_bytes_s if rates.to_host_bytes_s else 0.0)
