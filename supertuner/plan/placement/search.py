"""The search for the fastest placement that fits. Exhaustive for small steps, structured local search otherwise. Pure.

A step with n blocks has about 6^n placements, so only small steps are searched exhaustively. For the others:

1. Structured search. A placement is described by few numbers: s blocks are streamed, r blocks are recomputed. Which
   blocks is fixed by a ranking (the ones that save the most first; equal blocks spread evenly over the model). Of the
   remaining blocks, as many as fit keep their activations; the others send them. Those that keep are either the last
   blocks, whose activations the backward pass needs first, or spread evenly, so that the link has work all the time.
   The pairs (s, r) are searched on a coarse grid, then around the best points with halved strides (a pattern search,
   Hooke and Jeeves, 1961), for every placement of the optimizer and every prefetch distance.
2. Local search. One block is changed, or two blocks are swapped, as long as that improves the placement.

No placement is faster than the bound of `roofline.py`, so the search stops when it comes close to it. It is
deterministic: it counts its trials and reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Final, TypeAlias

from supertuner.plan.placement.choice import PlacementChoice, TimedStep
from supertuner.plan.placement.fast_simulate import ChoiceEvaluation, evaluate_choice
from supertuner.plan.placement.memory_needs import MemoryNeeds, compute_memory_needs
from supertuner.plan.placement.plan import ActivationPolicy, OptimizerPlacement
from supertuner.plan.placement.simulate import SIMULATED_MICRO_BATCHES
from supertuner.plan.placement.throughput import MemoryLimits

Counts: TypeAlias = tuple[int, int]
"""How many blocks are streamed, and how many are recomputed."""

EXHAUSTIVE_SEARCH_CHOICES: Final = 3000
"""Up to this many placements, all are evaluated."""
GOOD_ENOUGH_RATIO: Final = 1.002
"""The search stops at a placement that takes at most this many times the bound."""
MAX_SIMULATED_USES: Final = 240_000
"""Passes of blocks that are simulated at most, over all placements: about three seconds of one core."""
REFINED_GRID_POINTS: Final = 3
"""The search continues around this many best points of the coarse grid."""
TRAFFIC_WEIGHT: Final = 1e-3
"""A second on the link counts as this many seconds of the step, so that of two equally fast placements the one that
moves less wins."""
PREFETCH_DISTANCES: Final = (1, 2, 3, 0)
NEGLIGIBLE_SHARE: Final = 0.03
"""Optimizer state and gradients below this share of GPU memory are not offloaded."""


def search_placement(step: TimedStep, limits: MemoryLimits, bound_s: float) -> ChoiceEvaluation | None:
    """The best placement that was found; None if none fits.

    If everything fits on the GPU, or everything but the idle experts, that is the answer: no placement is faster.
    """
    count = len(step.weight_bytes)
    for choice in (PlacementChoice.all_on_gpu(count), replace(PlacementChoice.all_on_gpu(count), idle_at_home=True)):
        evaluation = evaluate_choice(step, choice, limits)
        if evaluation.simulated is not None and (not choice.idle_at_home or step.rates.has_link):
            return evaluation
    if _choice_count(step) <= EXHAUSTIVE_SEARCH_CHOICES:
        evaluations = (evaluate_choice(step, choice, limits) for choice in _all_choices(step))
        best = min(evaluations, key=lambda one: placement_cost(step, one))
        return None if best.simulated is None else best
    return _PlacementSearch(step, limits, bound_s).run()


def placement_cost(step: TimedStep, evaluation: ChoiceEvaluation) -> float:
    """What the search minimizes: the modelled time, and a little for the traffic on the link."""
    if evaluation.simulated is None:
        return math.inf
    return evaluation.seconds + TRAFFIC_WEIGHT * link_seconds(step, evaluation.choice)


def link_seconds(step: TimedStep, choice: PlacementChoice) -> float:
    """How long the link is busy in a window, both directions added."""
    rates, micro = step.rates, step.table.micro_batches
    if not rates.has_link:
        return 0.0
    assert rates.to_device_bytes_s is not None and rates.to_host_bytes_s is not None
    sent, streamed = sum(step.sent_bytes(choice)), sum(step.streamed_bytes(choice))
    gradients, trained = sum(step.offloaded_gradient_bytes(choice)), sum(step.streamed_trained_bytes(choice))
    up, down = micro * (sent + 2 * streamed) + (micro - 1) * gradients, micro * (sent + gradients)
    if choice.optimizer is OptimizerPlacement.HOST:
        up += sum(step.trained_bytes) - trained
    else:
        state = sum(step.state_bytes) if choice.optimizer is OptimizerPlacement.STREAMED else 0
        up, down = up + state + trained + gradients, down + state + trained
    return up / rates.to_device_bytes_s + down / rates.to_host_bytes_s


def min_update_s(step: TimedStep, optimizer: OptimizerPlacement) -> float:
    """Lower bound on the time of an update: its work, or the transfer of the state to the GPU and back."""
    if optimizer is OptimizerPlacement.HOST:
        return step.host_step_s
    if optimizer is OptimizerPlacement.GPU or step.rates.duplex:
        return step.update_s
    return max(step.update_s, step.rates.round_trip_s(sum(step.state_bytes)))


def optimizer_placements(step: TimedStep, limits: MemoryLimits) -> list[OptimizerPlacement]:
    """The placements of the optimizer to try. Small state stays on the GPU."""
    small = sum(step.state_bytes) + sum(step.gradient_bytes) <= NEGLIGIBLE_SHARE * limits.gpu_bytes
    return [OptimizerPlacement.GPU] if small else step.optimizer_placements


def evenly_spread_order(members: Sequence[int]) -> list[int]:
    """The members in an order whose every prefix is spread evenly over them: the van der Corput sequence, which
    reverses the bits of 0, 1, 2, … and so visits halves, quarters, eighths."""
    bits = max(1, (len(members) - 1).bit_length())
    order = sorted(range(1 << bits), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))
    return [members[number] for number in order if number < len(members)]


def _activation_policies(step: TimedStep, block: int) -> tuple[ActivationPolicy, ...]:
    policies = [ActivationPolicy.KEEP]
    if step.saved_bytes[block]:
        policies += [ActivationPolicy.SEND] if step.rates.has_link and step.movable[block] else []
        policies += [ActivationPolicy.RECOMPUTE] if step.table.blocks[block].recomputable else []
    return tuple(policies)


def _streaming_options(step: TimedStep, block: int) -> tuple[bool, ...]:
    return (False, True) if step.rates.has_link and step.movable[block] and step.streamable_bytes[block] else (False,)


def _choice_count(step: TimedStep) -> int:
    by_block = (len(_activation_policies(step, b)) * len(_streaming_options(step, b)) for b in step.block_numbers)
    return math.prod(by_block) * len(PREFETCH_DISTANCES) * len(OptimizerPlacement)


def _all_choices(step: TimedStep) -> Iterator[PlacementChoice]:
    for activations in product(*(_activation_policies(step, b) for b in step.block_numbers)):
        for streamed in product(*(_streaming_options(step, b) for b in step.block_numbers)):
            for ahead, optimizer in product(PREFETCH_DISTANCES, step.optimizer_placements):
                yield PlacementChoice(streamed, activations, ahead, optimizer, step.rates.has_link)


class _PlacementSearch:
    """The structured search and the local search for one step; see the file's docstring."""

    def __init__(self, step: TimedStep, limits: MemoryLimits, bound_s: float) -> None:
        self._step, self._limits, self._bound_s = step, limits, bound_s
        uses = 2 * len(step.weight_bytes) * min(step.table.micro_batches, SIMULATED_MICRO_BATCHES)
        self._trials_left = MAX_SIMULATED_USES // uses
        self._needs_by_choice: dict[PlacementChoice, MemoryNeeds] = {}
        self._best: ChoiceEvaluation | None = None
        policies = [_activation_policies(step, b) for b in step.block_numbers]
        self._can_send = [ActivationPolicy.SEND in allowed for allowed in policies]
        streamable = {b: step.streamable_bytes[b] for b in step.block_numbers if any(_streaming_options(step, b))}
        self._streaming_order = _rank_blocks(streamable)
        self._recompute_order = _rank_blocks(
            {
                b: (step.saved_bytes[b] - step.input_bytes[b]) / max(step.forward_s[b], 1e-12)
                for b in step.block_numbers
                if ActivationPolicy.RECOMPUTE in policies[b]
            }
        )
        """Blocks by how many bytes recomputing them frees per second that it takes, best first."""

    def run(self) -> ChoiceEvaluation | None:
        """Tries every placement of the optimizer at prefetch distance 1, then the best one at other distances, then
        changes of single blocks. Distance 0 is tried only if nothing has fitted: it overlaps no copies."""
        for ahead in PREFETCH_DISTANCES:
            optimizers = optimizer_placements(self._step, self._limits)
            if self._best is not None:
                if ahead == 0:
                    break
                optimizers = [self._best.choice.optimizer]
            for stepping, evenly in product(optimizers, (False, True)):
                self._search_counts(ahead, stepping, evenly)
                if self._done:
                    return self._best
        self._improve_single_blocks()
        return self._best

    @property
    def _done(self) -> bool:
        near = self._best is not None and self._best.seconds <= GOOD_ENOUGH_RATIO * self._bound_s
        return near or self._trials_left <= 0

    def _cost(self, choice: PlacementChoice | None) -> float:
        """Simulates a placement and remembers it if it is the best. Infinite if it does not fit or cannot be better."""
        if choice is None or (spare_s := self._spare_s(choice)) < 0:
            return math.inf
        self._trials_left -= 1
        needs = self._needs(choice)
        evaluation = evaluate_choice(self._step, choice, self._limits, memory_needs=needs, max_waiting_s=spare_s)
        cost = placement_cost(self._step, evaluation)
        if cost < (math.inf if self._best is None else placement_cost(self._step, self._best)):
            self._best = evaluation
        return cost

    def _spare_s(self, choice: PlacementChoice) -> float:
        """How long the placement may wait in total and still beat the best one; negative: its work alone, or its
        traffic alone, takes longer than the best. The simulation stops when it has waited that long."""
        if self._best is None:
            return math.inf
        step = self._step
        work_s = step.passes_s(choice.activations) + min_update_s(step, choice.optimizer)
        if not step.rates.duplex and link_seconds(step, choice) > self._best.seconds:
            return -1.0
        return self._best.seconds - work_s

    def _search_counts(self, ahead: int, optimizer: OptimizerPlacement, evenly: bool) -> None:
        """Searches the numbers of streamed and of recomputed blocks: a coarse grid, then around its best points."""
        max_counts = (len(self._streaming_order), len(self._recompute_order))
        costs: dict[Counts, float] = {}

        def value(at: Counts) -> float:
            if at not in costs:
                costs[at] = self._cost(self._build_choice(*at, ahead, optimizer, evenly))
            return costs[at]

        stride = max(1, math.ceil(max_counts[0] / 4)), max(1, math.ceil(max_counts[1] / 4))
        grid = [sorted({*range(0, limit + 1, by), limit}) for limit, by in zip(max_counts, stride, strict=True)]
        for at in product(*grid):
            value(at)
            if self._done:
                return
        ranked = sorted(costs, key=lambda key: (costs[key], key))
        # Also refine the best points with no block and with all blocks recomputed: the optimum is often at such an end.
        ends = [next(at for at in ranked if at[1] == end) for end in {0, max_counts[1]}]
        for start in dict.fromkeys([*ranked[:REFINED_GRID_POINTS], *sorted(ends)]):
            self._refine(start, stride, max_counts, value)

    def _refine(self, point: Counts, stride: Counts, max_counts: Counts, cost: Callable[[Counts], float]) -> None:
        """Pattern search: moves to the best of the eight neighbours; if none is better, halves the stride."""
        while not self._done:
            around = [(point[0] + i * stride[0], point[1] + j * stride[1]) for i, j in product((-1, 0, 1), repeat=2)]
            inside = [at for at in around if 0 <= at[0] <= max_counts[0] and 0 <= at[1] <= max_counts[1]]
            better = min(inside, key=lambda key: (cost(key), key))
            if cost(better) < cost(point):
                point = better
            elif stride == (1, 1):
                return
            else:
                stride = (max(1, stride[0] // 2), max(1, stride[1] // 2))

    def _build_choice(
        self, streamed_count: int, recomputed_count: int, ahead: int, optimizer: OptimizerPlacement, evenly: bool
    ) -> PlacementChoice | None:
        """The placement with these counts in which as many other blocks as fit keep their activations; None: even with
        none kept it does not fit."""
        numbers = self._step.block_numbers
        streaming, recomputed = set(self._streaming_order[:streamed_count]), self._recompute_order[:recomputed_count]
        streamed = tuple(b in streaming for b in numbers)
        others = [b for b in reversed(numbers) if b not in recomputed]
        if evenly:
            others = others[: ahead + 1] + evenly_spread_order(others[ahead + 1 :])

        def choice_keeping(kept: int) -> PlacementChoice:
            policies = [ActivationPolicy.SEND if can_send else ActivationPolicy.KEEP for can_send in self._can_send]
            for b in others[:kept]:
                policies[b] = ActivationPolicy.KEEP
            for b in recomputed:
                policies[b] = ActivationPolicy.RECOMPUTE
            return PlacementChoice(streamed, tuple(policies), ahead, optimizer, self._step.rates.has_link)

        if not self._fits_gpu(choice_keeping(0)):
            return None
        low, high = 0, len(others)  # binary search: each block that keeps its activations needs more GPU memory
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits_gpu(choice_keeping(middle)):
                low = middle
            else:
                high = middle - 1
        best_choice = choice_keeping(low)
        return best_choice if self._needs(best_choice).fits(self._limits, self._step.rates.one_pool) else None

    def _fits_gpu(self, choice: PlacementChoice) -> bool:
        return self._needs(choice).gpu_bytes <= self._limits.gpu_bytes

    def _needs(self, choice: PlacementChoice) -> MemoryNeeds:
        if choice not in self._needs_by_choice:
            self._needs_by_choice[choice] = compute_memory_needs(self._step, choice.without_immediate_refetches())
        return self._needs_by_choice[choice]

    def _improve_single_blocks(self) -> None:
        """Local search: takes the first neighbour that is better, and starts again from it, until none is."""
        best = self._best
        while best is not None and not self._done:
            for neighbour in _neighbours(self._step, best.choice):
                if self._fits_gpu(neighbour):
                    self._cost(neighbour)
                if self._done or self._best is not best:
                    break
            if self._best is best:
                return
            best = self._best


def _neighbours(step: TimedStep, choice: PlacementChoice) -> Iterator[PlacementChoice]:
    """Placements that differ in one block, then those in which two blocks are swapped."""
    for b in step.block_numbers:
        for policy in _activation_policies(step, b):
            if policy is not choice.activations[b]:
                yield replace(choice, activations=(*choice.activations[:b], policy, *choice.activations[b + 1 :]))
        for streamed in _streaming_options(step, b):
            if streamed is not choice.streamed[b]:
                yield replace(choice, streamed=(*choice.streamed[:b], streamed, *choice.streamed[b + 1 :]))
    for distance in (1, 2, 4, 8, 16):
        for b in step.block_numbers[:-distance]:
            yield from _swapped_choices(step, choice, b, b + distance)


def _swapped_choices(step: TimedStep, choice: PlacementChoice, first: int, second: int) -> Iterator[PlacementChoice]:
    activations, streamed = list(choice.activations), list(choice.streamed)
    activations[first], activations[second] = activations[second], activations[first]
    if (
        activations[first] is not activations[second]
        and activations[first] in _activation_policies(step, first)
        and activations[second] in _activation_policies(step, second)
    ):
        yield replace(choice, activations=tuple(activations))
    streamed[first], streamed[second] = streamed[second], streamed[first]
    if streamed[first] is not streamed[second] and all(True in _streaming_options(step, b) for b in (first, second)):
        yield replace(choice, streamed=tuple(streamed))


def _rank_blocks(merits: Mapping[int, float]) -> list[int]:
    """Blocks by merit, best first; blocks of equal merit (to 3 digits) in an evenly spread order."""
    by_merit: dict[float, list[int]] = {}
    for block, merit in merits.items():
        by_merit.setdefault(float(f"{merit:.3g}"), []).append(block)
    return [block for merit in sorted(by_merit, reverse=True) for block in evenly_spread_order(by_merit[merit])]
