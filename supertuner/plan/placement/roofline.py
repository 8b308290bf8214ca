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
    for optimizer in OptimizerPlacement:
        if optimizer is not OptimizerPlacement.GPU and not (rates.has_link and any(step.trained_bytes)):
            continue
        if optimizer is OptimizerPlacement.HOST and rates.host_bytes_s is None:
            continue
        candidate = _bound_with_optimizer(step, limits, optimizer, compute_s)
        if candidate.seconds < best.seconds:
            best = candidate
    return best


def _bound_with_optimizer(
    step: TimedStep, limits: MemoryLimits, optimizer: OptimizerPlacement, compute_s: float
) -> StepTimeBound:
    """The bound over all plans with this placement of the optimizer."""
    count, on_host = len(step.weight_bytes), optimizer is OptimizerPlacement.HOST
    programs = [
        _BackwardMoment(step, limits, optimizer, at).build_program()
        for at in range(max(0, count - EXAMINED_BLOCKS), count)
    ]
    if any(not program.feasible for program in programs):
        return StepTimeBound(math.inf, "does not fit", compute_s, None)
    best = max((bound_by_prices(program) for program in programs), key=lambda one: one.seconds)
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
        self._up_s_per_byte = 1.0 / rates.to_device_bytes_s if rates.has_link and rates.to_device_bytes_s else 0.0
        self._down_s_per_byte = 1.0 / rates.to_host_bytes_s if rates.has_link and rates.to_host_bytes_s else 0.0
        # If both directions of the link run at once (duplex), a phase is charged only with the direction that it uses
        # more: activations leave in the first phase, and return in the second.
        self._first_up_s_per_byte = 0.0 if rates.duplex else self._up_s_per_byte
        self._second_down_s_per_byte = self._update_down_s_per_byte = 0.0 if rates.duplex else self._down_s_per_byte

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
            first_link_s=missing * self._first_up_s_per_byte,
            second_work_s=micro_batches * (sum(step.backward_s) - later),
            second_link_s=sum(step.gradient_bytes[: block + 1]) * self._second_down_s_per_byte
            if self._on_host
            else 0.0,
            update_s=step.host_step_s if self._on_host else step.update_s,
            min_arrive_s=max(0, update_bytes - limits.gpu_bytes) * self._up_s_per_byte,
            min_depart_s=max(0, resident_bytes - limits.gpu_bytes) * self._update_down_s_per_byte,
            gpu_bytes=limits.gpu_bytes - self._always_on_gpu_bytes(),
            host_bytes=host - (sum(step.state_bytes) if self._on_host else 0),
            update_gpu_bytes=limits.gpu_bytes - (0 if self._on_host else self._never_offloaded_bytes()),
            items=self._items(),
        )

    def _always_on_gpu_bytes(self) -> float:
        """On the GPU at this moment in every plan: the block that computes, the batch, and what is never offloaded."""
        step, block = self._step, self._block
        gpu = (
            step.table.batch_bytes + step.backward_bytes[block] + step.weight_bytes[block] + step.gradient_bytes[block]
        )
        others = [b for b in range(len(step.weight_bytes)) if b != block and not step.streams_trained[b]]
        return gpu + sum(step.trained_bytes[b] + self._gradient_bytes_so_far(b) for b in others)

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
        items += [self._weight_options(b) for b in range(len(step.weight_bytes)) if b != block]
        state = float(sum(step.state_bytes))
        if self._optimizer is OptimizerPlacement.GPU:
            items.append((PlacementOption(gpu_bytes=state, update_gpu_bytes=state),))
        if self._optimizer is OptimizerPlacement.STREAMED:
            items.append(
                (
                    PlacementOption(
                        update_up_s=state * self._up_s_per_byte,
                        update_down_s=state * self._update_down_s_per_byte,
                        host_bytes=state,
                    ),
                )
            )
        items.append(self._stay_or_offload(step.table.idle_bytes, [PlacementOption()]))
        return tuple(items)

    def _weight_options(self, block: int) -> ItemOptions:
        """Weights, with their gradients if they are trained: on the GPU, or in host memory and fetched for every
        pass."""
        step, micro_batches = self._step, self._micro_batches
        # The backward pass of an earlier block is still to come, so its weights are fetched in the second phase. For a
        # later block it is over; that fetch is not counted (the forward pass counts weights that do not fit).
        earlier = block < self._block
        fetch_s = micro_batches * step.streamable_bytes[block] * self._up_s_per_byte if earlier else 0.0
        if not step.streams_trained[block]:
            return self._stay_or_offload(
                step.streamable_bytes[block], [PlacementOption(second_link_s=fetch_s)] if step.movable[block] else []
            )
        trained, gradient = step.trained_bytes[block], step.gradient_bytes[block]
        update_gpu = 0 if self._on_host else trained + gradient
        stay = PlacementOption(
            gpu_bytes=step.weight_bytes[block] + self._gradient_bytes_so_far(block), update_gpu_bytes=update_gpu
        )
        if not step.movable[block] or not step.rates.has_link:
            return (stay,)
        host = step.weight_bytes[block] + self._gradient_bytes_so_far(block)
        # The update left the block in host memory, so it is fetched at least once, for the first forward pass.
        first_fetch_s = step.streamable_bytes[block] * self._first_up_s_per_byte
        if self._on_host:
            return replace(stay, update_up_s=trained * self._up_s_per_byte), PlacementOption(
                first_fetch_s, second_link_s=fetch_s, host_bytes=host
            )
        gradients_down_s = (
            micro_batches * gradient * (self._second_down_s_per_byte if earlier else self._down_s_per_byte)
        )
        gradients_up_s = (
            (micro_batches - 1) * gradient * (self._up_s_per_byte if earlier else self._first_up_s_per_byte)
        )
        update_up_s, update_down_s = (trained + gradient) * self._up_s_per_byte, trained * self._update_down_s_per_byte
        if earlier:
            return stay, PlacementOption(
                first_fetch_s, 0.0, fetch_s + gradients_down_s + gradients_up_s, update_up_s, update_down_s, 0.0, host
            )
        return stay, PlacementOption(
            first_fetch_s + gradients_down_s + gradients_up_s, 0.0, 0.0, update_up_s, update_down_s, 0.0, host
        )

    def _activation_options(self, block: int) -> ItemOptions:
        """Keep, recompute, send, or send only the inputs and recompute from them."""
        step, micro_batches = self._step, self._micro_batches
        saved, inputs, recompute_s = (
            step.saved_bytes[block],
            step.input_bytes[block],
            micro_batches * step.forward_s[block],
        )
        recomputable = step.table.blocks[block].recomputable
        options = [PlacementOption(gpu_bytes=saved)]
        if recomputable:
            options.append(PlacementOption(second_work_s=recompute_s, gpu_bytes=inputs))
        if step.rates.has_link and step.movable[block]:
            options.append(
                PlacementOption(
                    micro_batches * saved * self._down_s_per_byte,
                    0.0,
                    micro_batches * saved * self._up_s_per_byte,
                    host_bytes=saved,
                )
            )
        if step.rates.has_link and step.movable[block] and recomputable:
            options.append(
                PlacementOption(
                    micro_batches * inputs * self._down_s_per_byte,
                    recompute_s,
                    micro_batches * inputs * self._up_s_per_byte,
                    host_bytes=inputs,
                )
            )
        return tuple(options)

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
