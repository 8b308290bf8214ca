"""The run's windows from any step on, each with its batches, made ahead of the step that uses them.

What is in a batch is a function of positions alone: samples by the order, noise and noise levels by the position of
each sample, the expert by the step. A thread makes the next batches in that order; whoever stops asking stops it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch

from supertuner.data.batching.batches import pinned_pool
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.windows import MicroBatch, micro_batches, share
from supertuner.models.objective import Law, level_at, sample_noise, sample_uniform
from supertuner.models.spec import Expert, Family, Model, Tensors
from supertuner.optim.schedule import Course, active
from supertuner.step.batch import StepBatch
from supertuner.train.parallel import Parallel


class Encoded(Protocol):
    """Where encoded samples come from."""

    def latents(self, micro: MicroBatch, /) -> Tensors: ...

    def texts(self, micro: MicroBatch, /) -> list[Tensors]: ...


@dataclass(frozen=True, eq=False, slots=True)
class Maker:
    """Makes the batch of a micro-batch and an expert."""

    corpus: Corpus
    encoded: Encoded
    family: Family
    model: Model
    law_of: Callable[[tuple[int, ...]], Law]
    """Shape of latents without batch → how their noise levels are drawn."""
    seed: int
    pin: bool
    """Put batches where a GPU can fetch them without the CPU."""

    def make(self, micro: MicroBatch, expert: Expert) -> StepBatch:
        fields = dict(self.encoded.latents(micro))
        latents = fields.pop("latents")
        shape = tuple(latents.shape[1:])
        positions = micro.draws.position.tolist()
        law = self.law_of(shape)
        levels = [level_at(sample_uniform(self.seed, p), law, expert.low, expert.high) for p in positions]
        batch = StepBatch(
            latents=latents,
            noise=torch.stack([sample_noise(self.seed, p, shape) for p in positions]),
            levels=torch.tensor(levels, dtype=torch.float32),
            text=self.family.pad_text(self.model, self.encoded.texts(micro)),
            conditions=fields,
            names=self._names(micro),
        )
        return batch.pinned() if self.pin else batch

    def _names(self, micro: MicroBatch) -> tuple[str, ...]:
        parts = [self.corpus.parts[self.corpus.order.groups[group].dataset] for group in micro.draws.group]
        samples = micro.draws.sample.tolist()
        return tuple(f"{p.samples.id}/{p.samples.key(s)}" for p, s in zip(parts, samples, strict=True))


@dataclass(frozen=True, slots=True)
class Plan:
    """What a window is, before anything of it is made."""

    step: int
    positions: range
    """Its samples, over all processes."""
    expert: int
    batches: int
    """How many of this process."""


class Window:
    """A window whose batches arrive one by one; take all of them before the next window."""

    def __init__(self, plan: Plan, feed: Feed) -> None:
        self.plan = plan
        self._feed = feed
        self.waited_s = 0.0
        """How long the batches taken so far were waited for."""

    def __iter__(self) -> Iterator[StepBatch]:
        for _ in range(self.plan.batches):
            begin = time.perf_counter()
            batch = self._feed.take()
            self.waited_s += time.perf_counter() - begin
            yield batch


class Feed:
    """An iterator over windows from `begin` on, and a context manager: leaving it drops what was begun."""

    def __init__(
        self,
        maker: Maker,
        course: Course,
        experts: tuple[Expert, ...],
        *,
        every: int,
        batch_size: int,
        ahead: int,
        parallel: Parallel,
        begin: int = 0,
    ) -> None:
        self._maker, self._course, self._experts = maker, course, experts
        self._every, self._batch_size, self._ahead = every, batch_size, ahead
        self._parallel = parallel
        self._work = self._plan(begin)
        self._begun: deque[Future[StepBatch]] = deque()
        self._plans: deque[Plan] = deque()
        self._pool = pinned_pool(1)

    def __iter__(self) -> Iterator[Window]:
        while self._plans or self._start_one():
            if self._plans:
                yield Window(self._plans.popleft(), self)

    def take(self) -> StepBatch:
        """The next batch, waited for; first those that may thereby be begun are begun."""
        while len(self._begun) <= self._ahead and self._start_one():
            pass
        return self._begun.popleft().result()

    def close(self) -> None:
        self._work = iter(())
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._begun.clear()
        self._plans.clear()

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_one(self) -> bool:
        """Begin the next batch; False if there is none."""
        planned = next(self._work, None)
        if planned is None:
            return False
        plan, micro = planned
        if micro is None:
            self._plans.append(plan)
        else:
            self._begun.append(self._pool.submit(self._maker.make, micro, self._experts[plan.expert]))
        return True

    def _plan(self, begin: int) -> Iterator[tuple[Plan, MicroBatch | None]]:
        """Each window, announced by itself, and then its batches."""
        for step in range(begin, self._course.total_steps):
            positions = self._course.window_of(step)
            mine = share(positions, self._parallel.rank, self._parallel.ranks)
            micros = micro_batches(self._maker.corpus.order, mine, self._batch_size)
            plan = Plan(step, positions, active(step, len(self._experts), self._every), len(micros))
            yield plan, None
            for micro in micros:
                yield plan, micro
