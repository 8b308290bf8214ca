"""Random but legal schedules of a step, which no planner would make: the lower bound must hold for them too.

A block computes only while its weights, activations and temporaries are on the GPU, and GPU memory is never exceeded.
Activations are copied to the host and back, or dropped if the block can be recomputed and its input is kept. Weights
are frozen, so dropping them costs nothing. Copies use the link one after the other; a block waits for what is on its
way. Everything else is random: anything may be sent, dropped or fetched at any time.
"""

from __future__ import annotations

import random

from supertuner.memory.emulator.clock import EmulatorClock
from supertuner.memory.emulator.configuration import EmulatorParameters
from supertuner.plan.placement.choice import TimedStep
from supertuner.plan.placement.throughput import MemoryLimits, emulator_figures


class ScheduleStuck(Exception):
    """The random choices led to a state in which nothing can be moved to free memory."""


class RandomSchedule:
    def __init__(self, step: TimedStep, limits: MemoryLimits, seed: int) -> None:
        self._step, self._gpu_limit, self._host_limit = step, limits.gpu_bytes, limits.host_bytes or 0
        self._random = random.Random(seed)
        self._clock = EmulatorClock(
            emulator_figures("random", step.rates, limits), EmulatorParameters(duplex=step.rates.duplex)
        )
        self._gpu: dict[tuple[str, int], int] = {("batch", 0): step.table.batch_bytes}
        self._arrival_s: dict[tuple[str, int], float] = {}
        """Time at which something on the GPU has arrived."""
        self._host: dict[tuple[str, int], int] = {("w", b): w for b, w in enumerate(step.weight_bytes)}
        self._to_recompute: set[int] = set()
        """Blocks that kept only their input."""
        if step.table.idle_bytes:
            self._host["idle", 0] = step.table.idle_bytes
        if sum(self._host.values()) > self._host_limit:
            raise ScheduleStuck
        for block, weights in enumerate(step.weight_bytes):  # a step may begin with any weights on the GPU
            if self._random.random() < 0.7 and self._used() + weights <= self._gpu_limit:
                self._gpu["w", block] = weights

    def seconds(self) -> float:
        for _ in range(self._step.table.micro_batches):
            for block in range(len(self._step.weight_bytes)):
                self._forward(block)
            for block in reversed(range(len(self._step.weight_bytes))):
                self._backward(block)
        self._clock.advance(self._step.update_s)
        return self._clock.now

    def _forward(self, block: int) -> None:
        step, key = self._step, ("w", block)
        self._bring(key, {key})
        pass_bytes = step.saved_bytes[block] + step.table.blocks[block].forward_peak_bytes
        self._free(pass_bytes, {key})
        self._clock.wait_until(self._arrival_s.get(key, 0.0))
        self._clock.advance(step.forward_s[block])
        self._gpu["a", block] = step.saved_bytes[block]
        if step.table.blocks[block].recomputable and self._random.random() < 0.3:
            self._gpu["a", block] = step.input_bytes[block]
            self._to_recompute.add(block)
        self._move_at_random(block)

    def _backward(self, block: int) -> None:
        step, keys = self._step, {("w", block), ("a", block)}
        for key in sorted(keys):
            self._bring(key, keys)
        peak = step.table.blocks[block].backward_peak_bytes
        missing = step.saved_bytes[block] - step.input_bytes[block] if block in self._to_recompute else 0
        self._free(peak + missing, keys)
        self._clock.wait_until(max(self._arrival_s.get(key, 0.0) for key in keys))
        self._clock.advance((step.forward_s[block] if block in self._to_recompute else 0.0) + step.backward_s[block])
        self._to_recompute.discard(block)
        del self._gpu["a", block]
        self._arrival_s.pop(("a", block), None)
        self._move_at_random(block)

    def _move_at_random(self, block: int) -> None:
        """Send, drop or fetch something at random."""
        if self._random.random() < 0.5:
            self._leave(self._random.choice(sorted(self._gpu)))
        fetchable = sorted(key for key in self._host if key not in self._gpu and key[0] != "idle")
        if fetchable and self._random.random() < 0.7:
            key = self._random.choice(fetchable)
            if self._used() + self._host[key] <= self._gpu_limit:
                self._bring(key, set())

    def _used(self) -> int:
        return sum(self._gpu.values())

    def _free(self, nbytes: int, spared: set[tuple[str, int]]) -> None:
        candidates = sorted(key for key in self._gpu if key not in spared)
        self._random.shuffle(candidates)
        while self._used() + nbytes > self._gpu_limit:
            if not candidates:
                raise ScheduleStuck
            self._leave(candidates.pop())

    def _leave(self, key: tuple[str, int]) -> None:
        if key[0] == "batch":
            return
        if key[0] == "a":
            if sum(self._host.values()) + self._gpu[key] > self._host_limit:
                return
            self._clock.wait_until(self._arrival_s.get(key, 0.0))
            self._clock.wait_until(self._clock.transfer(0, self._gpu[key]))  # its memory is free when the copy is done
            self._host[key] = self._gpu[key]
        del self._gpu[key]
        self._arrival_s.pop(key, None)

    def _bring(self, key: tuple[str, int], spared: set[tuple[str, int]]) -> None:
        if key in self._gpu:
            return
        self._free(self._host[key], spared)
        self._arrival_s[key] = self._clock.transfer(self._host[key], 0)
        self._gpu[key] = self._host[key]
        if key[0] == "a":
            del self._host[key]
