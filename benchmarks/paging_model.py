"""A step with everything in managed memory and nothing fetched ahead, on the software superchip.

Each use touches its weights, activations and temporaries; what is not on the GPU faults and comes, least recently used
blocks of memory leave for it, and the use waits: the same rule as in `playing`, where a use waits for its own data.
Charitable to paging: touching what is there costs nothing beyond the work itself; activations are kept or recomputed,
whichever is quicker; and memory that is dead is given back to the driver, which drops it and faults it in anew, or kept
by a caching allocator, which faults once but has dead pages evicted like others, whichever is quicker. Modelled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from supertuner.memory.driver import HOST, Advice, Gpu, Kind, Refused, Span
from supertuner.memory.emulator.figures import Parameters
from supertuner.memory.emulator.superchip import Superchip
from supertuner.memory.machines import Machine
from supertuner.plan.placement.choice import Step
from supertuner.plan.placement.plan import Fate
from supertuner.plan.placement.replay import PAGE_BYTES
from supertuner.plan.placement.throughput import Limits, figures_of

GPU = Gpu(0)
MICRO_BATCHES = 2
"""Of a window that are played; further ones take as long as the last."""


@dataclass(frozen=True, slots=True)
class Paged:
    """One window in a run of many."""

    seconds: float
    link_s: float
    """Of these, the link was busy."""
    fates: Fate
    """Of all activations."""


def paged(step: Step, machine: Machine, limits: Limits, *, latents_at_home: bool = False) -> Paged | None:
    """The quicker of keeping and recomputing. None: the memories together are too small.

    `latents_at_home`: the batch prefers host memory and is read there, as in the seeds' policy.
    """
    found = []
    for fate, caching in product((Fate.KEEP, Fate.RECOMPUTE), (False, True)):
        try:
            found.append(_Pager(step, machine, limits, fate, latents_at_home, caching).window())
        except Refused:
            continue  # too large for both memories; another may fit
    return min(found, key=lambda paged: paged.seconds, default=None)


class _Pager:
    def __init__(
        self, step: Step, machine: Machine, limits: Limits, fate: Fate, latents_at_home: bool, caching: bool
    ) -> None:
        self._step, self._fate, self._caching = step, fate, caching
        self._unused: dict[int, list[Span]] = {}
        """Dead ranges that the caching allocator keeps, by their size."""
        self._space: Span | None = None
        figures = figures_of(machine.title, step.rates, limits, ats=machine.ats)
        figures = replace(figures, gpu_read_bytes_s=math.inf, gpu_write_bytes_s=math.inf, host_bytes_s=math.inf)
        pages = Parameters().fault_batch_pages * 65536 // PAGE_BYTES  # batches of as many bytes, whatever the page
        parameters = Parameters(fault_batch_pages=pages, duplex=step.rates.duplex)
        self._chip = Superchip(figures, page_bytes=PAGE_BYTES, parameters=parameters)
        blocks = step.table.blocks
        self._weights = [self._loaded(b.frozen_bytes) for b in blocks]
        self._trained = [self._loaded(b.trained_bytes) for b in blocks]
        self._state = [self._loaded(b.state_bytes) for b in blocks]
        self._idle = self._loaded(step.table.idle_bytes)
        self._batch = self._loaded(step.table.batch_bytes)
        if latents_at_home and self._batch is not None and not step.rates.one_pool:
            self._chip.advise(self._batch, Advice.PREFERRED_LOCATION, HOST)
        self._gradients: list[Span | None] = [None] * len(blocks)
        self._saved: list[Span | None] = [None] * len(blocks)

    def window(self) -> Paged:
        self._run()
        begin, busy = self._chip.clock.now, self._link_s()
        extra = self._run()
        return Paged(self._chip.clock.now - begin + extra, self._link_s() - busy, self._fate)

    def _run(self) -> float:
        """One window; the seconds of micro-batches that were not played."""
        count, micro = len(self._weights), self._step.table.micro_batches
        last = 0.0
        for _ in range(min(micro, MICRO_BATCHES)):
            begin = self._chip.clock.now
            self._touch([self._batch])
            for block in range(count):
                self._forward(block)
            for block in reversed(range(count)):
                self._backward(block)
            last = self._chip.clock.now - begin
        for block in range(count):
            self._update(block)
        return last * max(0, micro - MICRO_BATCHES)

    def _forward(self, block: int) -> None:
        step, table = self._step, self._step.table.blocks[block]
        recomputed = self._recomputed(block)
        self._saved[block] = self._new(step.inputs[block] if recomputed else step.saved[block])
        transient = table.forward_peak_bytes + (step.saved[block] - step.inputs[block] if recomputed else 0)
        self._touch([self._weights[block], self._trained[block]])
        self._working(transient, [self._saved[block]], step.forward_s[block])

    def _backward(self, block: int) -> None:
        step, table = self._step, self._step.table.blocks[block]
        recomputed = self._recomputed(block)
        transient = table.backward_peak_bytes + (step.saved[block] - step.inputs[block] if recomputed else 0)
        self._touch([self._weights[block], self._trained[block], self._saved[block]])
        if self._gradients[block] is None:
            self._gradients[block] = self._new(step.gradients[block])
        again = step.forward_s[block] if recomputed else 0.0
        self._working(transient, [self._gradients[block]], again + step.backward_s[block])
        self._drop(self._saved, block)

    def _update(self, block: int) -> None:
        step = self._step
        self._touch([self._trained[block], self._gradients[block], self._state[block]], write=True)
        self._chip.compute(step.update_s * step.shares[block])
        self._drop(self._gradients, block)

    def _recomputed(self, block: int) -> bool:
        return self._fate is Fate.RECOMPUTE and self._step.table.blocks[block].recomputable

    def _working(self, transient: int, written: Sequence[Span | None], seconds: float) -> None:
        space = self._scratch(transient) if self._caching else self._new(transient)
        self._touch([space, *written], write=True)
        self._chip.compute(seconds)
        if not self._caching:
            self._free(space)

    def _touch(self, spans: Sequence[Span | None], write: bool = False) -> None:
        for span in spans:
            if span is not None:
                self._chip.touch(span, GPU, write=write)

    def _loaded(self, nbytes: int) -> Span | None:
        """Managed memory that the host has filled."""
        span = self._new(nbytes)
        if span is not None:
            self._chip.touch(span, HOST, write=True)
        return span

    def _new(self, nbytes: int) -> Span | None:
        if self._unused.get(nbytes):
            return self._unused[nbytes].pop()
        return Span(self._chip.allocate(Kind.MANAGED, nbytes), nbytes) if nbytes else None

    def _scratch(self, nbytes: int) -> Span | None:
        """The beginning of one range that all temporaries share."""
        if self._space is None:
            blocks = self._step.table.blocks
            most = max(b.saved_bytes + max(b.forward_peak_bytes, b.backward_peak_bytes) for b in blocks)
            self._space = self._new(most)
        return None if self._space is None or not nbytes else Span(self._space.address, nbytes)

    def _free(self, span: Span | None) -> None:
        if span is None:
            return
        if self._caching:
            self._unused.setdefault(span.nbytes, []).append(span)
        else:
            self._chip.free(span.address)

    def _drop(self, spans: list[Span | None], block: int) -> None:
        self._free(spans[block])
        spans[block] = None

    def _link_s(self) -> float:
        rates, traffic = self._step.rates, self._chip.traffic
        up = traffic.to_device_bytes / rates.to_device_bytes_s if rates.to_device_bytes_s else 0.0
        return up + (traffic.to_host_bytes / rates.to_host_bytes_s if rates.to_host_bytes_s else 0.0)
