"""Where a run stands, computed from its position alone: window sizes, number of steps, learning rate, active expert.

A window is what one optimizer step consumes: E samples over all processes. E is a function of the samples consumed
before the window, evaluated only where a window begins:

    E(c) = start + ⌊(end - start) · c / samples⌋    while c < samples, and `end` from there on

so it never changes while a window is being filled, never falls, and a resumed run needs no state to go on alike.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from supertuner.config.settings.tree import RunConfig

Kind: TypeAlias = Literal["constant", "cosine", "linear"]


@dataclass(frozen=True, slots=True)
class Ramp:
    """How the window grows. A constant size is the ramp that starts where it ends."""

    start: int
    end: int
    samples: int = 0
    """Samples over which the window grows from `start` to `end`."""

    def __post_init__(self) -> None:
        assert 1 <= self.start <= self.end, f"a ramp goes up from at least 1, not from {self.start} to {self.end}"
        assert self.samples >= 0, f"{self.samples} samples"

    @property
    def grows(self) -> bool:
        return self.start < self.end and self.samples > 0


def ramp_of(config: RunConfig, processes: int) -> Ramp:
    """The window sizes that a configuration asks for. One of `batch_rampup_steps` is `train.batch_size` samples."""
    train, asked = config.train, config.gh200_optimizations
    constant = train.batch_size * train.gradient_accumulation_steps * processes
    if not asked.enable_batch_size_rampup or asked.initial_effective_batch_size is None:
        return Ramp(constant, constant)
    end = asked.target_effective_batch_size or constant
    return Ramp(asked.initial_effective_batch_size, end, asked.batch_rampup_steps * train.batch_size)


def window_samples(consumed: int, ramp: Ramp) -> int:
    """Samples in the window that begins after `consumed` samples."""
    if consumed >= ramp.samples:
        return ramp.end
    return ramp.start + (ramp.end - ramp.start) * consumed // ramp.samples


def windows(total: int, ramp: Ramp, begin: int = 0) -> Iterator[range]:
    """The run from `begin` on, as ranges of sample positions; the last may be short."""
    while begin < total:
        end = min(begin + window_samples(begin, ramp), total)
        yield range(begin, end)
        begin = end


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive windows of one size."""

    step: int
    """The first of them, counted from the start of the run."""
    begin: int
    """The position where it begins."""
    size: int


def stretches(ramp: Ramp) -> tuple[Stretch, ...]:
    """The run without an end, as windows of equal size; the last stretch goes on for ever.

    There are at most as many as sizes, however long the ramp is: how many windows have a size is a closed form.
    """
    step, begin, found = 0, 0, []
    while True:
        size = window_samples(begin, ramp)
        found.append(Stretch(step, begin, size))
        if size == ramp.end:
            return tuple(found)
        larger_from = _ceil((size - ramp.start + 1) * ramp.samples, ramp.end - ramp.start)
        count = _ceil(larger_from - begin, size)
        step, begin = step + count, begin + count * size


@dataclass(frozen=True, slots=True)
class Course:
    """The whole run: how its windows grow, and where it ends."""

    ramp: Ramp
    total_samples: int
    total_steps: int
    why: str
    """Which setting ends the run, for people."""
    stretches: tuple[Stretch, ...] = field(repr=False, compare=False)

    def step_at(self, consumed: int) -> int:
        """The optimizer step whose window holds position `consumed`; at the end of the run, the number of steps."""
        if consumed >= self.total_samples:
            return self.total_steps
        return _step_at(consumed, self.stretches)

    def consumed(self, steps: int) -> int:
        """Samples that so many optimizer steps consume."""
        return self.total_samples if steps >= self.total_steps else self.window_of(steps).start

    def window_of(self, step: int) -> range:
        """The positions that optimizer step `step` consumes; the last window may be short."""
        assert 0 <= step < self.total_steps, f"step {step} of {self.total_steps}"
        begin = _begin_of(step, self.stretches)
        return range(begin, min(begin + window_samples(begin, self.ramp), self.total_samples))

    def changes_at(self, step: int) -> bool:
        """Whether E differs from that of the step before."""
        return step > 0 and _part_of(step, self.stretches).step == step


def course_of(config: RunConfig, epoch_begin: Callable[[int], int], processes: int) -> Course:
    """The run that a configuration asks for: `max_steps` windows or `num_epochs` epochs, whichever ends first.

    With neither, it is one epoch. `epoch_begin(n)` is the number of samples in the first n epochs.
    """
    ramp = ramp_of(config, processes)
    parts = stretches(ramp)
    max_steps, epochs = config.train.max_steps, config.train.num_epochs
    by_steps = None if max_steps is None else _begin_of(max_steps, parts)
    if epochs is None and by_steps is not None:
        return Course(ramp, by_steps, _steps(by_steps, parts), f"train.max_steps {max_steps} ends the run", parts)
    by_epochs = epoch_begin(epochs or 1)
    total, why = by_epochs, f"train.num_epochs {epochs} ends the run"
    if epochs is None:
        why = "one epoch: neither train.max_steps nor train.num_epochs is set"
    elif by_steps is not None and by_steps <= by_epochs:
        total, why = by_steps, f"train.max_steps {max_steps} ends the run, no later than train.num_epochs {epochs}"
    elif by_steps is not None:
        why += f", before train.max_steps {max_steps}"
    return Course(ramp, total, _steps(total, parts), why, parts)


def rate_factor(step: int, total_steps: int, kind: Kind, warmup: int) -> float:
    """What the learning rate is multiplied by at optimizer step `step`, the first being 0.

    Warm-up, s < w:                   (s + 1) / w: no step is wasted on a rate of zero, and the last one has it all.
    Afterwards, u = (s - w) / (n - w): constant 1; linear 1 - u; cosine (1 + cos πu) / 2. Zero where the run ends.
    """
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return 1.0 - done if kind == "linear" else (1.0 + math.cos(math.pi * done)) / 2


def active(step: int, experts: int, every: int) -> int:
    """Which of several experts is trained in optimizer step `step`: each for `every` steps, in turn."""
    return step // every % experts


def accumulation(samples: int, batch_size: int, processes: int) -> int:
    """Micro-batches per process that a window of `samples` is cut into, where its samples are all of one bucket."""
    return _ceil(_ceil(samples, processes), batch_size)


def ramp_text(ramp: Ramp, batch_size: int, processes: int) -> str:
    """The line of the log that says how windows grow."""
    first, last = (accumulation(size, batch_size, processes) for size in (ramp.start, ramp.end))
    return (
        f"GH200 gradient accumulation ramp enabled: effective batch size {ramp.start} -> {ramp.end} over "
        f"{ramp.samples} samples (gradient_accumulation_steps {first} -> {last})"
    )


def change_text(size: int, batch_size: int, processes: int) -> str:
    """The line of the log for a window that is larger than the one before."""
    count = accumulation(size, batch_size, processes)
    return f"GH200 ramp adjusted effective batch size -> {size} (gradient_accumulation_steps -> {count})"


def _steps(total: int, parts: tuple[Stretch, ...]) -> int:
    """Windows that it takes to consume `total` samples."""
    return _step_at(total - 1, parts) + 1 if total > 0 else 0


def _step_at(position: int, parts: tuple[Stretch, ...]) -> int:
    part = parts[bisect_right(parts, position, key=lambda part: part.begin) - 1]
    return part.step + (position - part.begin) // part.size


def _begin_of(step: int, parts: tuple[Stretch, ...]) -> int:
    part = _part_of(step, parts)
    return part.begin + (step - part.step) * part.size


def _part_of(step: int, parts: tuple[Stretch, ...]) -> Stretch:
    return parts[bisect_right(parts, step, key=lambda part: part.step) - 1]


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
