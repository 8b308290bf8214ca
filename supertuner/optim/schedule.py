"""Pure functions of the position in a run: window size, number of steps, learning rate and active expert.

A window is the set of samples of one optimizer step: E samples over all processes. E is a function of the number of
samples c consumed before the window:

    E(c) = start + ⌊(end - start) · c / samples⌋    while c < samples, then E(c) = end

It is evaluated only at the beginning of a window, so it never changes while a window is being filled, and it never
decreases. A resumed run needs no state to continue with the same windows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from supertuner.config.settings.run_config import RunConfig

LrScheduleKind: TypeAlias = Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"]


@dataclass(frozen=True, slots=True)
class BatchRamp:
    """The growth of the window size. A constant size is a ramp with start equal to end."""

    start: int
    end: int
    samples: int = 0
    """Samples over which the window grows from `start` to `end`."""

    def __post_init__(self) -> None:
        assert 1 <= self.start <= self.end, f"a ramp grows from at least 1; not from {self.start} to {self.end}"
        assert self.samples >= 0, f"{self.samples} samples"

    @property
    def grows(self) -> bool:
        return self.start < self.end and self.samples > 0


def build_batch_ramp(config: RunConfig, world_size: int) -> BatchRamp:
    """The ramp of a configuration. Each of its `batch_rampup_steps` is `train.batch_size` samples."""
    train, ramp = config.train, config.gh200_optimizations
    constant = train.batch_size * train.gradient_accumulation_steps * world_size
    if not ramp.enable_batch_size_rampup or ramp.initial_effective_batch_size is None:
        return BatchRamp(constant, constant)
    end, samples = ramp.target_effective_batch_size or constant, ramp.batch_rampup_steps * train.batch_size
    return BatchRamp(ramp.initial_effective_batch_size, end, samples)


def window_samples(consumed: int, ramp: BatchRamp) -> int:
    """The size of the window that begins after `consumed` samples."""
    if consumed >= ramp.samples:
        return ramp.end
    return ramp.start + (ramp.end - ramp.start) * consumed // ramp.samples


def windows(total: int, ramp: BatchRamp, start: int = 0) -> Iterator[range]:
    """The windows from position `start` to the end of the run, as ranges of positions; the last may be shorter."""
    while start < total:
        end = min(start + window_samples(start, ramp), total)
        yield range(start, end)
        start = end


@dataclass(frozen=True, slots=True)
class EqualWindowSpan:
    """A run of consecutive windows of equal size."""

    first_step: int
    """The index of its first window in the run."""
    first_position: int
    """The position where that window begins."""
    window_size: int


def equal_window_spans(ramp: BatchRamp) -> tuple[EqualWindowSpan, ...]:
    """The windows of a run without end, grouped into spans of equal size. The last span is unlimited.

    The number of windows of one size has a closed form, so there is at most one span per size however long the ramp is.
    """
    step, position, spans = 0, 0, []
    while True:
        size = window_samples(position, ramp)
        spans.append(EqualWindowSpan(step, position, size))
        if size == ramp.end:
            return tuple(spans)
        larger_from = _ceil((size - ramp.start + 1) * ramp.samples, ramp.end - ramp.start)
        count = _ceil(larger_from - position, size)
        step, position = step + count, position + count * size


@dataclass(frozen=True, slots=True)
class TrainingSchedule:
    """The whole run: how its windows grow, and where it ends."""

    ramp: BatchRamp
    total_samples: int
    total_steps: int
    end_reason: str
    """Which setting ends the run, as text for the log."""
    spans: tuple[EqualWindowSpan, ...] = field(repr=False, compare=False)

    def samples_after(self, steps: int) -> int:
        """The number of samples that the first `steps` optimizer steps consume."""
        return self.total_samples if steps >= self.total_steps else self.window_at(steps).start

    def window_at(self, step: int) -> range:
        """The positions of optimizer step `step`; the last window may be shorter."""
        assert 0 <= step < self.total_steps, f"step {step} of {self.total_steps}"
        start = _window_start(step, self.spans)
        return range(start, min(start + window_samples(start, self.ramp), self.total_samples))

    def window_size_changes_at(self, step: int) -> bool:
        """Whether the window size E differs from that of the previous step."""
        return step > 0 and _span_of(step, self.spans).first_step == step


def build_training_schedule(
    config: RunConfig, samples_before_epoch: Callable[[int], int], world_size: int
) -> TrainingSchedule:
    """The schedule of a configuration: `max_steps` windows or `num_epochs` epochs, whichever ends first.

    With neither, one epoch. `samples_before_epoch(n)` is the number of samples in the first n epochs.
    """
    ramp = build_batch_ramp(config, world_size)
    spans = equal_window_spans(ramp)
    max_steps, epochs = config.train.max_steps, config.train.num_epochs
    by_steps = None if max_steps is None else _window_start(max_steps, spans)
    if epochs is None and by_steps is not None:
        total, end_reason = by_steps, f"train.max_steps {max_steps} ends the run"
    elif epochs is None:
        total, end_reason = samples_before_epoch(1), "one epoch: neither train.max_steps nor train.num_epochs is set"
    else:
        total, end_reason = samples_before_epoch(epochs), f"train.num_epochs {epochs} ends the run"
        if by_steps is not None and by_steps <= total:
            total = by_steps
            end_reason = f"train.max_steps {max_steps} ends the run, no later than train.num_epochs {epochs}"
        elif by_steps is not None:
            end_reason += f", before train.max_steps {max_steps}"
    return TrainingSchedule(ramp, total, _step_count(total, spans), end_reason, spans)


def learning_rate_factor(
    step: int,
    total_steps: int,
    kind: LrScheduleKind,
    warmup: int,
    end: float = 0.0,
    power: float = 1.0,
    cycles: int = 1,
) -> float:
    """The factor on the learning rate at optimizer step s = `step` (the first is 0) of n steps with w warm-up steps.

    Warm-up, s < w:   (s + 1) / w. The first step has a rate above zero, the last warm-up step the full rate.
    Afterwards:       e + (1 - e) · f(u) with e = `end` and u = (s - w) / (n - w):
                      linear 1 - u; polynomial (1 - u)^`power`; cosine (1 + cos πu) / 2; cosine_with_restarts the
                      cosine of the fraction of `cycles` · u. The constant rate is 1.

    All but the constant rate reach `end` at s = n, the end of the run.
    """
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant":
        return 1.0
    done, falling_steps = step - warmup, max(1, total_steps - warmup)
    if kind == "cosine_with_restarts" and done < falling_steps:
        done = cycles * done % falling_steps  # in whole numbers, so that no restart is late by a rounding error
    progress = min(1.0, done / falling_steps)
    if kind in ("linear", "polynomial"):
        shape = math.pow(1.0 - progress, power if kind == "polynomial" else 1.0)
    else:
        shape = (1.0 + math.cos(math.pi * progress)) / 2
    return end + (1.0 - end) * shape


def active_expert_index(step: int, experts: int, every: int) -> int:
    """The index of the expert that is trained in optimizer step `step`: each in turn for `every` steps."""
    return step // every % experts


def accumulation_steps(samples: int, batch_size: int, world_size: int) -> int:
    """Micro-batches per process of a window of `samples` samples, if all samples are in one bucket."""
    return _ceil(_ceil(samples, world_size), batch_size)


def ramp_text(ramp: BatchRamp, batch_size: int, world_size: int) -> str:
    """The log line about a ramp."""
    first, last = (accumulation_steps(size, batch_size, world_size) for size in (ramp.start, ramp.end))
    return (
        f"gradient accumulation ramp enabled: effective batch size {ramp.start} -> {ramp.end} over "
        f"{ramp.samples} samples (gradient_accumulation_steps {first} -> {last})"
    )


def ramp_change_text(size: int, batch_size: int, world_size: int) -> str:
    """The log line about a window that is larger than the previous one."""
    count = accumulation_steps(size, batch_size, world_size)
    return f"ramp adjusted effective batch size -> {size} (gradient_accumulation_steps -> {count})"


def _step_count(total: int, spans: tuple[EqualWindowSpan, ...]) -> int:
    """The number of windows that consume `total` samples."""
    if total <= 0:
        return 0
    span = spans[bisect_right(spans, total - 1, key=lambda span: span.first_position) - 1]
    return span.first_step + (total - 1 - span.first_position) // span.window_size + 1


def _window_start(step: int, spans: tuple[EqualWindowSpan, ...]) -> int:
    span = _span_of(step, spans)
    return span.first_position + (step - span.first_step) * span.window_size


def _span_of(step: int, spans: tuple[EqualWindowSpan, ...]) -> EqualWindowSpan:
    return spans[bisect_right(spans, step, key=lambda span: span.first_step) - 1]


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
