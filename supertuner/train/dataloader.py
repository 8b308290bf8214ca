"""The run's windows from any step on, each with its batches, made ahead of the step that uses them.

What is in a batch is a function of positions alone: samples by the order, noise and noise levels by the position of
each sample, the expert by the step. A thread makes the next batches in that order, where that gains anything; whoever
stops asking stops it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, TypeAlias

import torch

from supertuner.config.settings.tree import RunConfig
from supertuner.data.batching.batches import pinned_pool
from supertuner.data.cache_policy import How, treatment
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.order import Draws
from supertuner.data.ordering.windows import MicroBatch, cut, share
from supertuner.distributed.process_group import Parallel
from supertuner.models.objective.diffusion import Law, level_at, sample_noise, sample_uniform
from supertuner.models.spec import Expert, Family, Model, Tensors
from supertuner.optim.schedule import Course, active
from supertuner.step.batch import StepBatch
from supertuner.train.loss_weights import Counting

AT_ONCE = 1024
"""Positions that the order is asked for together: its cost is per call."""


def batches_ahead(config: RunConfig, device: torch.device) -> tuple[int, str]:
    """How many batches are made ahead, and why."""
    ahead = config.loader.ahead
    if config.loader.prefetch_batches is not None:
        return ahead, "as configured"
    if device.type != "cpu":
        return ahead, f"made by the CPU while {device} computes"
    treated = [treatment(one, config.cache_config) for one in config.datasets]
    if any(how is not How.CACHED for one in treated for how in (one.media, one.text)):
        return ahead, "not all samples are cached"
    return 0, "all samples are cached, and the model needs the CPU itself"


class Encoded(Protocol):
    """Where encoded samples come from."""

    def latents(self, micro: MicroBatch, /) -> Tensors: ...

    def texts(self, micro: MicroBatch, /) -> list[Tensors]: ...

    def framing(self, micro: MicroBatch, /) -> torch.Tensor: ...

    def turns(self, micro: MicroBatch, /) -> list[int]: ...


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
    place: Callable[[StepBatch], StepBatch] | None
    """Puts a batch where the GPU can fetch it without the CPU; None: it stays where it is made."""
    counting: Counting | None = None
    """What samples count beside their noise level; None: all the same."""

    def make(self, micro: MicroBatch, expert: Expert) -> StepBatch:
        fields = dict(self.encoded.latents(micro))
        latents = fields.pop("latents")
        if self.model.told_framing:
            fields["framing"] = self.encoded.framing(micro)
        shape = tuple(latents.shape[1:])
        positions = micro.draws.position.tolist()
        law = self.law_of(shape)
        noise = torch.empty((len(positions), *shape))
        for row, position in zip(noise, positions, strict=True):
            sample_noise(self.seed, position, shape, out=row)
        levels = [level_at(sample_uniform(self.seed, p), law, expert.low, expert.high) for p in positions]
        batch = StepBatch(
            latents=latents,
            noise=noise,
            levels=torch.tensor(levels, dtype=torch.float32),
            text=self.family.pad_text(self.model, self.encoded.texts(micro)),
            conditions=fields,
            positions=tuple(positions),
            counts={} if self.counting is None else self.counting.of(micro, self.encoded.turns(micro), shape),
        )
        return batch if self.place is None else self.place(batch)

    def name(self, position: int) -> str:
        """The sample at a position, for people."""
        draw = self.corpus.order.at(position)
        samples = self.corpus.parts[draw.dataset].samples
        return f"{samples.id}/{samples.key(draw.sample)}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a window is, before anything of it is made."""

    step: int
    positions: range
    """Its samples, over all processes."""
    share: range
    """Those of this process."""
    expert: int
    batches: int
    """How many this process computes."""


class Window:
    """A window whose batches arrive one by one; take all of them before the next window."""

    def __init__(self, plan: Plan, first: StepBatch | None, waited_s: float, feed: Feed) -> None:
        self.plan = plan
        self._first, self._feed = first, feed
        self.waited_s = waited_s
        """How long the batches taken so far were waited for."""

    def __iter__(self) -> Iterator[StepBatch]:
        if self._first is not None:
            yield self._first
        for _ in range(self.plan.batches - 1):
            item, waited_s = self._feed.take()
            self.waited_s += waited_s
            assert item is not None and item[1] is not None, "a window has as many batches as its plan says"
            yield item[1]


Item: TypeAlias = tuple[Plan, StepBatch | None]
"""A batch with the plan of its window; a window in which this process has no share is announced without one."""


class Feed:
    """An iterator over windows from `begin` on, and a context manager: leaving it drops what was begun.

    Planning is the thread's work too: whoever takes a batch that is ready does nothing but take it. With none `ahead`
    there is no thread, and each is made when it is taken.
    """

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
        self._items = self._make(begin)
        self._begun: deque[Future[Item | None]] = deque()
        self._pool = pinned_pool(1) if ahead else None

    def __iter__(self) -> Iterator[Window]:
        while True:
            item, waited_s = self.take()
            if item is None:
                return
            yield Window(*item, waited_s, self)

    def take(self) -> tuple[Item | None, float]:
        """The next batch, and how long it was waited for; None after the last. What may thereby be begun, is."""
        while self._pool is not None and len(self._begun) <= self._ahead:
            self._begun.append(self._pool.submit(next, self._items, None))
        begin = time.perf_counter()
        item = self._begun.popleft().result() if self._begun else next(self._items, None)
        return item, time.perf_counter() - begin

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._begun.clear()

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make(self, begin: int) -> Iterator[Item]:
        """One batch after the other. The order is asked for many positions at once."""
        order = self._maker.corpus.order
        first, block = 0, order.slice(0, 0)
        for step in range(begin, self._course.total_steps):
            positions = self._course.window_of(step)
            if positions.stop > first + len(block):
                first, block = (
                    positions.start,
                    order.slice(positions.start, max(positions.stop, positions.start + AT_ONCE)),
                )

            def micros_of(part: range, first: int = first, block: Draws = block) -> list[MicroBatch]:
                return cut(order, block.take(slice(part.start - first, part.stop - first)), self._batch_size)

            mine = share(positions, self._parallel.rank, self._parallel.ranks)
            micros = micros_of(mine)
            idle = self._idle(positions, len(micros), micros_of)
            expert = active(step, len(self._experts), self._every)
            plan = Plan(step, positions, mine, expert, len(micros) + len(idle))
            if not plan.batches:
                yield plan, None
            for micro in micros:
                yield plan, self._maker.make(micro, self._experts[expert])
            for micro in idle:
                yield plan, replace(self._maker.make(micro, self._experts[expert]), idle=True)

    def _idle(self, positions: range, own: int, micros_of: Callable[[range], list[MicroBatch]]) -> list[MicroBatch]:
        """What is computed while others still have batches and this process has not; the smallest that there is."""
        if not self._parallel.in_step:
            return []
        ranks = self._parallel.ranks
        most = max(len(micros_of(share(positions, rank, ranks))) for rank in range(ranks))
        return micros_of(range(positions.start, positions.start + 1)) * (most - own)
