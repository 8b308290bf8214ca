"""The run's windows from any step on, each with its batches, which are made ahead of the step that uses them.

The content of a batch is a function of positions alone: the order gives the samples, the position of a sample its noise
and noise level, the step the expert. Where it pays, a thread makes the next batches, in the same order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.waiting import waiting_for_thread, working_on
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
from supertuner.train.encoding.cache_lookup import EncodedCorpus
from supertuner.train.run.loss_weights import SampleLossWeights

ORDER_CHUNK = 1024
"""Positions per call of the sample order, whose cost is per call."""
BATCH_TASK = "next batch"


def batches_ahead(config: RunConfig, device: torch.device) -> tuple[int, str]:
    """How many batches are made ahead, and the reason for the decision that is reported."""
    ahead = config.loader.batches_ahead
    if config.loader.prefetch_batches is not None:
        return ahead, "as configured"
    if device.type != "cpu":
        return ahead, f"the CPU makes them while {device} computes"
    policies = [dataset_cache_policy(dataset, config.cache_config) for dataset in config.datasets]
    if any(mode is not CacheMode.CACHED for policy in policies for mode in (policy.media_mode, policy.text_mode)):
        return ahead, "not all samples are cached"
    return 0, "all samples are cached, and the model needs the CPU itself"


@dataclass(frozen=True, eq=False, slots=True)
class BatchCollator:
    """Makes the batch of a micro-batch for an expert."""

    corpus: Corpus
    encoded: EncodedCorpus
    family: Family
    model: ModelDescription
    timestep_distribution_for: Callable[[tuple[int, ...]], TimestepDistribution]
    """Shape of one sample's latents → distribution of its noise levels."""
    seed: int
    place_batch: Callable[[StepBatch], StepBatch] | None
    """Moves a batch to memory that the GPU can read without the CPU; None: it stays where it is made."""
    loss_weights: SampleLossWeights | None = None
    """Weights and masks of samples in the loss; None: all count the same."""

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
        uniforms = [sample_uniform(self.seed, position) for position in positions]
        sigmas = [sigma_at(uniform, distribution, expert.sigma_min, expert.sigma_max) for uniform in uniforms]
        loss_inputs: Tensors = {}
        if self.loss_weights is not None:
            loss_inputs = self.loss_weights.tensors_for(micro_batch, self.encoded.cycles(micro_batch), shape)
        batch = StepBatch(
            latents=latents,
            noise=noise,
            sigmas=torch.tensor(sigmas, dtype=torch.float32),
            text=self.family.pad_text(self.model, self.encoded.texts(micro_batch)),
            conditions=fields,
            positions=tuple(positions),
            loss_inputs=loss_inputs,
        )
        return batch if self.place_batch is None else self.place_batch(batch)

    def sample_name(self, position: int) -> str:
        """`dataset/sample` of a position, for messages."""
        draw = self.corpus.order.draw_at(position)
        samples = self.corpus.datasets[draw.dataset_index].samples
        return f"{samples.id}/{samples.key(draw.sample)}"


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """What a window consists of, before its batches are made."""

    step: int
    positions: range
    """Its samples, over all ranks."""
    local_positions: range
    """The samples of this rank."""
    expert_index: int
    local_batches: int
    """How many batches this rank computes, padding included."""


class TrainingWindow:
    """A window that yields its batches one by one; take all of them before the next window."""

    def __init__(
        self, plan: WindowPlan, first_batch: StepBatch | None, waited_s: float, loader: TrainingDataLoader
    ) -> None:
        self.plan, self._first_batch, self._loader = plan, first_batch, loader
        self.waited_s = waited_s
        """Seconds of waiting for the batches taken so far."""

    def __iter__(self) -> Iterator[StepBatch]:
        if self._first_batch is not None:
            yield self._first_batch
        for _ in range(self.plan.local_batches - 1):
            item, waited_s = self._loader.next_item()
            self.waited_s += waited_s
            assert item is not None and item[1] is not None, "a window has as many batches as its plan"
            yield item[1]


LoaderItem: TypeAlias = tuple[WindowPlan, StepBatch | None]
"""A batch with the plan of its window. A window without samples for this rank comes once, with None."""


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    batch_size: int
    """Samples per micro-batch."""
    switch_every: int
    """Steps until training switches to the next expert."""
    batches_ahead: int
    """Batches that a thread makes ahead; 0: no thread, each batch is made when it is taken."""


class TrainingDataLoader:
    """An iterator over windows from `start_step` on, and a context manager: leaving it drops batches that were started.

    The thread also plans the windows, so taking a batch that is ready costs nothing else.
    """

    def __init__(
        self,
        collator: BatchCollator,
        schedule: TrainingSchedule,
        experts: tuple[Expert, ...],
        options: LoaderOptions,
        process_group: ProcessGroup,
        *,
        start_step: int = 0,
    ) -> None:
        self._collator, self._schedule, self._experts = collator, schedule, experts
        self._options, self._process_group = options, process_group
        self._items = self._produce_items(start_step)
        self._in_flight: deque[Future[LoaderItem | None]] = deque()
        self._executor = single_threaded_torch_pool(1) if options.batches_ahead else None

    def __iter__(self) -> Iterator[TrainingWindow]:
        while True:
            item, waited_s = self.next_item()
            if item is None:
                return
            yield TrainingWindow(*item, waited_s, self)

    def next_item(self) -> tuple[LoaderItem | None, float]:
        """(the next batch, or None after the last; seconds of waiting for it). Starts further batches ahead."""
        while self._executor is not None and len(self._in_flight) <= self._options.batches_ahead:
            self._in_flight.append(self._executor.submit(self._produce_next))
        started_s = time.perf_counter()
        if self._in_flight:
            with waiting_for_thread(BATCH_TASK):
                item = self._in_flight.popleft().result()
        else:
            item = next(self._items, None)
        return item, time.perf_counter() - started_s

    def _produce_next(self) -> LoaderItem | None:
        with working_on(BATCH_TASK):
            return next(self._items, None)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None
        self._in_flight.clear()

    def __enter__(self) -> TrainingDataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _produce_items(self, start_step: int) -> Iterator[LoaderItem]:
        """The batches of all windows from `start_step` on. Calls the sample order for ORDER_CHUNK positions at once."""
        order = self._collator.corpus.order
        first_position, draws = 0, order.slice(0, 0)
        for step in range(start_step, self._schedule.total_steps):
            positions = self._schedule.window_at(step)
            if positions.stop > first_position + len(draws):
                first_position = positions.start
                draws = order.slice(first_position, max(positions.stop, first_position + ORDER_CHUNK))
            micro_batches_of = partial(self._split, draws, first_position)
            local_positions = shard_window(positions, self._process_group.rank, self._process_group.world_size)
            micro_batches = micro_batches_of(local_positions)
            padding = self._padding_batches(positions, len(micro_batches), micro_batches_of)
            expert = active_expert_index(step, len(self._experts), self._options.switch_every)
            plan = WindowPlan(step, positions, local_positions, expert, len(micro_batches) + len(padding))
            if not plan.local_batches:
                yield plan, None
            for micro_batch in micro_batches:
                yield plan, self._collator.collate(micro_batch, self._experts[expert])
            for micro_batch in padding:
                yield plan, replace(self._collator.collate(micro_batch, self._experts[expert]), idle=True)

    def _split(self, draws: SampleDraws, first_position: int, positions: range) -> list[MicroBatch]:
        """The micro-batches of these positions, which are among `draws`."""
        rows = slice(positions.start - first_position, positions.stop - first_position)
        return split_micro_batches(self._collator.corpus.order, draws.take(rows), self._options.batch_size)

    def _padding_batches(
        self, positions: range, local_count: int, micro_batches_of: Callable[[range], list[MicroBatch]]
    ) -> list[MicroBatch]:
        """Micro-batches of one sample that this rank computes, and discards, while other ranks still have batches.

        Needed where all ranks run every pass together; ranks of one window may have different numbers of batches.
        """
        if not self._process_group.forward_is_collective:
            return []
        world_size = self._process_group.world_size
        max_count = max(len(micro_batches_of(shard_window(positions, rank, world_size))) for rank in range(world_size))
        return micro_batches_of(range(positions.start, positions.start + 1)) * (max_count - local_count)
