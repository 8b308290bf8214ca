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

from supertuner.config.settings.run_config import RunConfig
from supertuner.data.batching.decoder_pool import single_threaded_torch_pool
from supertuner.data.cache_policy import CacheMode, dataset_cache_policy
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.micro_batches import MicroBatch, shard_window, split_micro_batches
from supertuner.data.ordering.sample_order import SampleDraws
from supertuner.distributed.process_group import ProcessGroup
from supertuner.models.objective.diffusion import TimestepDistribution, sample_noise, sample_uniform, sigma_at
from supertuner.models.spec import Expert, Family, ModelDescription, Tensors
from supertuner.optim.schedule import TrainingSchedule, active_expert_index
from supertuner.step.batch import StepBatch
from supertuner.train.run.loss_weights import SampleLossWeights

ORDER_CHUNK = 1024
"""Positions that the order is asked for together: its cost is per call."""


def batches_ahead(config: RunConfig, device: torch.device) -> tuple[int, str]:
    """How many batches are made ahead, and why."""
    ahead = config.loader.batches_ahead
    if config.loader.prefetch_batches is not None:
        return ahead, "as configured"
    if device.type != "cpu":
        return ahead, f"made by the CPU while {device} computes"
    treatments = [dataset_cache_policy(one, config.cache_config) for one in config.datasets]
    if any(how is not CacheMode.CACHED for one in treatments for how in (one.media_mode, one.text_mode)):
        return ahead, "not all samples are cached"
    return 0, "all samples are cached, and the model needs the CPU itself"


class EncodedSampleSource(Protocol):
    """Where encoded samples come from."""

    def latents(self, micro_batch: MicroBatch, /) -> Tensors: ...

    def texts(self, micro_batch: MicroBatch, /) -> list[Tensors]: ...

    def framing(self, micro_batch: MicroBatch, /) -> torch.Tensor: ...

    def cycles(self, micro_batch: MicroBatch, /) -> list[int]: ...


@dataclass(frozen=True, eq=False, slots=True)
class BatchCollator:
    """Makes the batch of a micro-batch and an expert."""

    corpus: Corpus
    encoded: EncodedSampleSource
    family: Family
    model: ModelDescription
    timestep_distribution_for: Callable[[tuple[int, ...]], TimestepDistribution]
    """Shape of latents without batch → how their noise levels are drawn."""
    seed: int
    place_batch: Callable[[StepBatch], StepBatch] | None
    """Puts a batch where the GPU can fetch it without the CPU; None: it stays where it is made."""
    loss_weights: SampleLossWeights | None = None
    """What samples count beside their noise level; None: all the same."""

    def collate(self, micro_batch: MicroBatch, expert: Expert) -> StepBatch:
        fields = dict(self.encoded.latents(micro_batch))
        latents = fields.pop("latents")
        if self.model.micro_conditioning:
            fields["framing"] = self.encoded.framing(micro_batch)
        shape = tuple(latents.shape[1:])
        positions = micro_batch.draws.position.tolist()
        distribution = self.timestep_distribution_for(shape)
        noise = torch.empty((len(positions), *shape))
        for row, position in zip(noise, positions, strict=True):
            sample_noise(self.seed, position, shape, out=row)
        sigmas = [
            sigma_at(sample_uniform(self.seed, p), distribution, expert.sigma_min, expert.sigma_max) for p in positions
        ]
        batch = StepBatch(
            latents=latents,
            noise=noise,
            sigmas=torch.tensor(sigmas, dtype=torch.float32),
            text=self.family.pad_text(self.model, self.encoded.texts(micro_batch)),
            conditions=fields,
            positions=tuple(positions),
            loss_inputs={}
            if self.loss_weights is None
            else self.loss_weights.tensors_for(micro_batch, self.encoded.cycles(micro_batch), shape),
        )
        return batch if self.place_batch is None else self.place_batch(batch)

    def sample_name(self, position: int) -> str:
        """The sample at a position, for people."""
        draw = self.corpus.order.draw_at(position)
        samples = self.corpus.datasets[draw.dataset_index].samples
        return f"{samples.id}/{samples.key(draw.sample)}"


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """What a window is, before anything of it is made."""

    step: int
    positions: range
    """Its samples, over all processes."""
    local_positions: range
    """Those of this process."""
    expert_index: int
    local_batches: int
    """How many this process computes."""


class TrainingWindow:
    """A window whose batches arrive one by one; take all of them before the next window."""

    def __init__(
        self, plan: WindowPlan, first_batch: StepBatch | None, waited_s: float, loader: TrainingDataLoader
    ) -> None:
        self.plan = plan
        self._first_batch, self._loader = first_batch, loader
        self.waited_s = waited_s
        """How long the batches taken so far were waited for."""

    def __iter__(self) -> Iterator[StepBatch]:
        if self._first_batch is not None:
            yield self._first_batch
        for _ in range(self.plan.local_batches - 1):
            item, waited_s = self._loader.next_item()
            self.waited_s += waited_s
            assert item is not None and item[1] is not None, "a window has as many batches as its plan says"
            yield item[1]


LoaderItem: TypeAlias = tuple[WindowPlan, StepBatch | None]
"""A batch with the plan of its window; a window in which this process has no share is announced without one."""


class TrainingDataLoader:
    """An iterator over windows from `begin` on, and a context manager: leaving it drops what was begun.

    Planning is the thread's work too: whoever takes a batch that is ready does nothing but take it. With none `ahead`
    there is no thread, and each is made when it is taken.
    """

    def __init__(
        self,
        collator: BatchCollator,
        schedule: TrainingSchedule,
        experts: tuple[Expert, ...],
        *,
        switch_every: int,
        batch_size: int,
        batches_ahead: int,
        process_group: ProcessGroup,
        start_step: int = 0,
    ) -> None:
        self._collator, self._schedule, self._experts = collator, schedule, experts
        self._switch_every, self._batch_size, self._batches_ahead = switch_every, batch_size, batches_ahead
        self._process_group = process_group
        self._items = self._produce_items(start_step)
        self._in_flight: deque[Future[LoaderItem | None]] = deque()
        self._executor = single_threaded_torch_pool(1) if batches_ahead else None

    def __iter__(self) -> Iterator[TrainingWindow]:
        while True:
            item, waited_s = self.next_item()
            if item is None:
                return
            yield TrainingWindow(*item, waited_s, self)

    def next_item(self) -> tuple[LoaderItem | None, float]:
        """The next batch, and how long it was waited for; None after the last. What may thereby be begun, is."""
        while self._executor is not None and len(self._in_flight) <= self._batches_ahead:
            self._in_flight.append(self._executor.submit(next, self._items, None))
        started_s = time.perf_counter()
        item = self._in_flight.popleft().result() if self._in_flight else next(self._items, None)
        return item, time.perf_counter() - started_s

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None
        self._in_flight.clear()

    def __enter__(self) -> TrainingDataLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _produce_items(self, start_step: int) -> Iterator[LoaderItem]:
        """One batch after the other. The order is asked for many positions at once."""
        order = self._collator.corpus.order
        first_position, draws = 0, order.slice(0, 0)
        for step in range(start_step, self._schedule.total_steps):
            positions = self._schedule.window_at(step)
            if positions.stop > first_position + len(draws):
                first_position, draws = (
                    positions.start,
                    order.slice(positions.start, max(positions.stop, positions.start + ORDER_CHUNK)),
                )

            def micro_batches_of(
                part: range, first: int = first_position, block: SampleDraws = draws
            ) -> list[MicroBatch]:
                return split_micro_batches(
                    order, block.take(slice(part.start - first, part.stop - first)), self._batch_size
                )

            local_positions = shard_window(positions, self._process_group.rank, self._process_group.world_size)
            micro_batches = micro_batches_of(local_positions)
            padding = self._padding_batches(positions, len(micro_batches), micro_batches_of)
            expert = active_expert_index(step, len(self._experts), self._switch_every)
            plan = WindowPlan(step, positions, local_positions, expert, len(micro_batches) + len(padding))
            if not plan.local_batches:
                yield plan, None
            for micro_batch in micro_batches:
                yield plan, self._collator.collate(micro_batch, self._experts[expert])
            for micro_batch in padding:
                yield plan, replace(self._collator.collate(micro_batch, self._experts[expert]), idle=True)

    def _padding_batches(
        self, positions: range, local_count: int, micro_batches_of: Callable[[range], list[MicroBatch]]
    ) -> list[MicroBatch]:
        """What is computed while others still have batches and this process has not; the smallest that there is."""
        if not self._process_group.forward_is_collective:
            return []
        world_size = self._process_group.world_size
        max_count = max(len(micro_batches_of(shard_window(positions, rank, world_size))) for rank in range(world_size))
        return micro_batches_of(range(positions.start, positions.start + 1)) * (max_count - local_count)
