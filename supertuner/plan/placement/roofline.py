"""A proven lower bound on the modelled time of a step on a machine, over all plans. Pure.

Every plan spends at least: the blocks' own work, one block after the other; the forward pass of a block again if its
activations are neither kept nor sent; the time on the link of all bytes that must cross it, in the phase in which they
must; and the update after the last gradient, with everything that is copied in for it and out again (between two
windows everything is at its permanent place), or the optimizer's step on the host.

Where the optimizer steps is tried in turn. Everything else a plan decides is left to a relaxation, which may even treat
fractions of a block differently: at the moment of one block's backward pass, activations of earlier blocks, weights and
idle experts are on the GPU, in host memory, or to be recomputed, such that both memories are large enough. The cheapest
combination is bounded from below with prices (`lp_bound.py`). What holds at that one moment for every plan holds for
the best plan, so the bound is valid for any moment; the last blocks give the highest bounds, because most activations
exist there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from supertuner.plan.placement.choice import TimedStep
from supertuner.plan.placement.lp_bound import BoundProgram, ItemOptions, PlacementOption, PricedBound, bound_by_prices
from supertuner.plan.placement.plan import OptimizerPlacement
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits

EXAMINED_BLOCKS: Final = 3
"""The backward passes of this many last blocks are examined. Each gives a valid bound; the highest counts."""


@dataclass(frozen=True, slots=True)
class StepTimeBound:
    """Modelled seconds that no plan can undercut; infinite if no plan fits."""

    seconds: float
    limited_by: str
    """`compute`, `gpu memory`, `link to gpu`, `link to host`, `host memory`; `does not fit` if no plan fits."""
    compute_s: float
    """The step's own work without recomputation, with the optimizer's step on the GPU."""
    optimizer: OptimizerPlacement | None
    """Where the optimizer steps in the case with the lowest bound."""


def step_time_bound(table: StepTable, rates: MachineRates, limits: MemoryLimits) -> StepTimeBound:
    """The bound for one window. The rates must be known (`MachineRates.unknown_rates`)."""
    step = TimedStep.from_table(table, rates)
    compute_s = table.micro_batches * step.micro_batch_s + step.update_s
    best = StepTimeBound(math.inf, "does not fit", compute_s, None)
    for optimizer in step.optimizer_placements:
        candidate = _bound_with_optimizer(step, limits, optimizer, compute_s)
        if candidate.seconds < best.seconds:
            best = candidate
    return best


def _bound_with_optimizer(
    step: TimedStep, limits: MemoryLimits, optimizer: OptimizerPlacement, compute_s: float
) -> StepTimeBound:
    """The bound over all plans with this placement of the optimizer."""
    on_host, last_blocks = optimizer is OptimizerPlacement.HOST, step.block_numbers[-EXAMINED_BLOCKS:]
    programs = [_BackwardMoment(step, limits, optimizer, block).build_program() for block in last_blocks]
    if not all(program.feasible for program in programs):
        return StepTimeBound(math.inf, "does not fit", compute_s, None)
    best = max(map(bound_by_prices, programs), key=lambda one: one.seconds)
    # The work alone is a bound too. The prices include it; taking the maximum keeps rounding from falling below it.
    seconds = max(best.seconds, step.table.micro_batches * step.micro_batch_s + (0.0 if on_host else step.update_s))
    return StepTimeBound(seconds, _limiting_resource(step, on_host, best), compute_s, optimizer)


class _BackwardMoment:
    """The relaxed problem at the moment when one block is in its backward pass.

    Seconds are summed and bytes are averaged over the window's micro-batches, each of which has such a moment. A plan
    may treat micro-batches differently: its choices then average to a mixture, which the relaxation allows.
    """

    def __init__(self, step: TimedStep, limits: MemoryLimits, optimizer: OptimizerPlacement, block: int) -> None:
        self._step, self._limits, self._optimizer, self._block = step, limits, optimizer, block
        self._on_host = optimizer is OptimizerPlacement.HOST
        self._micro_batches = step.table.micro_batches
        rates = step.rates
        # Seconds per byte in each direction of the link.
        self._up = 1.0 / rates.to_device_bytes_s if rates.has_link and rates.to_device_bytes_s else 0.0
        self._down = 1.0 / rates.to_host_bytes_s if rates.has_link and rates.to_host_bytes_s else 0.0
        # If both directions of the link run at once (duplex), a phase is charged only with the direction that it uses
        # more: activations leave in the first phase, and return in the second.
        self._first_up = 0.0 if rates.duplex else self._up
        self._second_down = self._update_down = 0.0 if rates.duplex else self._down

    def build_program(self) -> BoundProgram:
        step, limits, block, micro_batches = self._step, self._limits, self._block, self._micro_batches
        later = sum(step.backward_s[block + 1 :])
        host = 0 if limits.host_bytes is None or not step.rates.has_link else limits.host_bytes
        # At the start of a forward pass there are no activations. Weights that do not fit even then are fetched in it.
        missing = max(0, sum(step.weight_bytes) - limits.gpu_bytes) * micro_batches
        # The update needs parameters, state and gradients on the GPU. What did not fit before it must arrive, and what
        # does not fit after it must leave.
        resident_bytes = 0 if self._on_host else sum(step.trained_bytes) + sum(step.state_bytes)
        update_bytes = resident_bytes + sum(step.gradient_bytes) if resident_bytes else 0
        return BoundProgram(
            first_work_s=micro_batches * (sum(step.forward_s) + later),
            first_link_s=missing * self._first_up,
            second_work_s=micro_batches * (sum(step.backward_s) - later),
            second_link_s=sum(step.gradient_bytes[: block + 1]) * self._second_down if self._on_host else 0.0,
            update_s=step.host_step_s if self._on_host else step.update_s,
            min_arrive_s=max(0, update_bytes - limits.gpu_bytes) * self._up,
            min_depart_s=max(0, resident_bytes - limits.gpu_bytes) * self._update_down,
            gpu_bytes=limits.gpu_bytes - self._always_on_gpu_bytes(),
            host_bytes=host - (sum(step.state_bytes) if self._on_host else 0),
            update_gpu_bytes=limits.gpu_bytes - (0 if self._on_host else self._never_offloaded_bytes()),
            items=self._items(),
        )

    def _always_on_gpu_bytes(self) -> float:
        """On the GPU at this moment in every plan: the block that computes, the batch, and what is never offloaded."""
        step, block = self._step, self._block
        own = step.backward_bytes[block] + step.weight_bytes[block] + step.gradient_bytes[block]
        others = [b for b in step.block_numbers if b != block and not step.streams_trained[b]]
        adapters = sum(step.trained_bytes[b] + self._gradient_bytes_so_far(b) for b in others)
        return step.table.batch_bytes + own + adapters

    def _never_offloaded_bytes(self) -> int:
        """What the update needs and every plan keeps on the GPU: adapters of blocks with larger frozen weights."""
        step = self._step
        rows = zip(step.trained_bytes, step.gradient_bytes, step.streams_trained, strict=True)
        return sum(trained + gradient for trained, gradient, streamed in rows if not streamed)

    def _gradient_bytes_so_far(self, block: int) -> float:
        """Bytes of a block's gradient at this moment, averaged over the micro-batches.

        Later blocks have theirs already; earlier ones have it from the second micro-batch on.
        """
        if self._on_host:
            return 0.0
        all_bytes = self._step.gradient_bytes[block]
        return all_bytes if block > self._block else all_bytes * (self._micro_batches - 1) / self._micro_batches

    def _items(self) -> tuple[ItemOptions, ...]:
        """What a plan decides about: activations of earlier blocks, weights, optimizer state, idle experts."""
        step, block = self._step, self._block
        items = [self._activation_options(b) for b in range(block)]
        items += [self._weight_options(b) for b in step.block_numbers if b != block]
        state = float(sum(step.state_bytes))
        if self._optimizer is OptimizerPlacement.GPU:
            items.append((PlacementOption(gpu_bytes=state, update_gpu_bytes=state),))
        if self._optimizer is OptimizerPlacement.STREAMED:
            up_s, down_s = state * self._up, state * self._update_down
            items.append((PlacementOption(update_up_s=up_s, update_down_s=down_s, host_bytes=state),))
        items.append(self._stay_or_offload(step.table.idle_bytes, [PlacementOption()]))
        return tuple(items)

    def _weight_options(self, block: int) -> ItemOptions:
        """Weights, with their gradients if they are trained: on the GPU, or in host memory and fetched for every
        pass."""
        step, micro_batches = self._step, self._micro_batches
        # The backward pass of an earlier block is still to come, so its weights are fetched in the second phase. For a
        # later block it is over; that fetch is not counted (the forward pass counts weights that do not fit).
        earlier = block < self._block
        streamable = step.streamable_bytes[block]
        fetch_s = micro_batches * streamable * self._up if earlier else 0.0
        if not step.streams_trained[block]:
            offloaded = [PlacementOption(second_link_s=fetch_s)] if step.movable[block] else []
            return self._stay_or_offload(streamable, offloaded)
        trained, gradient = step.trained_bytes[block], step.gradient_bytes[block]
        nbytes = step.weight_bytes[block] + self._gradient_bytes_so_far(block)
        stay = PlacementOption(gpu_bytes=nbytes, update_gpu_bytes=0 if self._on_host else trained + gradient)
        if not step.movable[block] or not step.rates.has_link:
            return (stay,)
        # The update left the block in host memory, so it is fetched at least once, for the first forward pass.
        first_fetch_s = streamable * self._first_up
        if self._on_host:
            stay = replace(stay, update_up_s=trained * self._up)
            return stay, PlacementOption(first_fetch_s, second_link_s=fetch_s, host_bytes=nbytes)
        down_s = micro_batches * gradient * (self._second_down if earlier else self._down)
        up_s = (micro_batches - 1) * gradient * (self._up if earlier else self._first_up)
        first_s = first_fetch_s if earlier else first_fetch_s + down_s + up_s
        second_s = fetch_s + down_s + up_s if earlier else 0.0
        update_up_s, update_down_s = (trained + gradient) * self._up, trained * self._update_down
        return stay, PlacementOption(first_s, 0.0, second_s, update_up_s, update_down_s, host_bytes=nbytes)

    def _activation_options(self, block: int) -> ItemOptions:
        """Keep, recompute, send, or send only the inputs and recompute from them."""
        step, recompute_s = self._step, self._micro_batches * self._step.forward_s[block]
        saved, inputs = step.saved_bytes[block], step.input_bytes[block]
        recomputable = step.table.blocks[block].recomputable
        options = [PlacementOption(gpu_bytes=saved)]
        if recomputable:
            options.append(PlacementOption(second_work_s=recompute_s, gpu_bytes=inputs))
        if step.rates.has_link and step.movable[block]:
            options += [self._send(saved), *([self._send(inputs, recompute_s)] if recomputable else [])]
        return tuple(options)

    def _send(self, nbytes: int, work_s: float = 0.0) -> PlacementOption:
        total = self._micro_batches * nbytes
        return PlacementOption(total * self._down, work_s, total * self._up, host_bytes=nbytes)

    def _stay_or_offload(self, nbytes: float, offload_options: list[PlacementOption]) -> ItemOptions:
        stay = PlacementOption(gpu_bytes=nbytes)
        if not self._step.rates.has_link:
            return (stay,)
        return (stay, *(replace(option, gpu_bytes=0.0, host_bytes=nbytes) for option in offload_options))


def _limiting_resource(step: TimedStep, on_host: bool, best: PricedBound) -> str:
    """The resource that most of the bound is spent on."""
    spent = {"compute": 0.0, "link to host": 0.0, "link to gpu": 0.0, "update": 0.0}
    work = ("compute", "compute", "update")
    # Phase 1 mainly sends activations, phase 2 fetches them, the update fetches what did not fit.
    link = ("link to host", "link to gpu", "link to gpu")
    for number, seconds in enumerate(best.phases_s):
        spent[link[number] if best.by_link[number] else work[number]] += seconds
    largest = max(spent, key=lambda name: spent[name])
    if largest == "update":
        return "host memory" if on_host else "gpu memory"
    if largest != "compute":
        return largest
    blocks = step.table.blocks
    works = [block.forward for block in blocks] + [block.backward for block in blocks]
    in_memory = sum(step.rates.seconds(one) for one in works if step.rates.is_memory_bound(one))
    return "gpu memory" if 2 * in_memory > step.micro_batch_s else "compute"
