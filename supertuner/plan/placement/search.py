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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Final

from supertuner.plan.placement.choice import PlacementChoice, TimedStep
from supertuner.plan.placement.fast_simulate import ChoiceEvaluation, evaluate_choice
from supertuner.plan.placement.memory_needs import MemoryNeeds, compute_memory_needs
from supertuner.plan.placement.plan import ActivationPolicy, OptimizerPlacement
from supertuner.plan.placement.simulate import SIMULATED_MICRO_BATCHES
from supertuner.plan.placement.throughput import MemoryLimits

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
        return _best_evaluation(step, (evaluate_choice(step, choice, limits) for choice in _all_choices(step)))
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
    sent = sum(
        saved
        for saved, policy in zip(step.saved_bytes, choice.activations, strict=True)
        if policy is ActivationPolicy.SEND
    )
    streamed = sum(w for w, offloaded in zip(step.streamable_bytes, choice.streamed, strict=True) if offloaded)
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
    assert step.rates.to_device_bytes_s is not None and step.rates.to_host_bytes_s is not None
    state = sum(step.state_bytes)
    return max(step.update_s, state / step.rates.to_device_bytes_s + state / step.rates.to_host_bytes_s)


def optimizer_placements(step: TimedStep, limits: MemoryLimits) -> list[OptimizerPlacement]:
    """The placements of the optimizer to try. Small state stays on the GPU."""
    placements = [OptimizerPlacement.GPU]
    if step.rates.has_link and sum(step.state_bytes) + sum(step.gradient_bytes) > NEGLIGIBLE_SHARE * limits.gpu_bytes:
        placements.append(OptimizerPlacement.STREAMED)
        if step.rates.host_bytes_s is not None:
            placements.append(OptimizerPlacement.HOST)
    return placements


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
    blocks = math.prod(
        len(_activation_policies(step, b)) * len(_streaming_options(step, b)) for b in range(len(step.weight_bytes))
    )
    return blocks * len(PREFETCH_DISTANCES) * len(OptimizerPlacement)


def _all_choices(step: TimedStep) -> Iterator[PlacementChoice]:
    count = len(step.weight_bytes)
    can_offload_optimizer = step.rates.has_link and any(step.trained_bytes)
    optimizers = [
        stepping for stepping in OptimizerPlacement if stepping is OptimizerPlacement.GPU or can_offload_optimizer
    ]
    if step.rates.host_bytes_s is None and can_offload_optimizer:
        optimizers.remove(OptimizerPlacement.HOST)
    policies = product(*(_activation_policies(step, b) for b in range(count)))
    for activations in policies:
        for streamed in product(*(_streaming_options(step, b) for b in range(count))):
            for ahead, stepping in product(PREFETCH_DISTANCES, optimizers):
                yield PlacementChoice(streamed, activations, ahead, stepping, step.rates.has_link)


def _best_evaluation(step: TimedStep, evaluations: Iterator[ChoiceEvaluation]) -> ChoiceEvaluation | None:
    best = min(evaluations, key=lambda verdict: placement_cost(step, verdict), default=None)
    return None if best is None or best.simulated is None else best


class _PlacementSearch:
    """The structured search and the local search for one step; see the file's docstring."""

    def __init__(self, step: TimedStep, limits: MemoryLimits, bound_s: float) -> None:
        self._step, self._limits, self._bound_s = step, limits, bound_s
        self._trials_left = MAX_SIMULATED_USES // (
            2 * len(step.weight_bytes) * min(step.table.micro_batches, SIMULATED_MICRO_BATCHES)
        )
        self._needs_by_choice: dict[PlacementChoice, MemoryNeeds] = {}
        self._micro_batch_s = step.micro_batch_s
        self._best: ChoiceEvaluation | None = None
        self._streaming_order = _rank_blocks(
            step,
            lambda b: float(step.streamable_bytes[b]),
            [b for b in range(len(step.weight_bytes)) if any(_streaming_options(step, b))],
        )
        recomputable = [
            b for b in range(len(step.weight_bytes)) if ActivationPolicy.RECOMPUTE in _activation_policies(step, b)
        ]
        self._recompute_order = _rank_blocks(
            step, lambda b: (step.saved_bytes[b] - step.input_bytes[b]) / max(step.forward_s[b], 1e-12), recomputable
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
        if choice is None:
            return math.inf
        spare_s = self._spare_s(choice)
        if spare_s < 0:
            return math.inf
        self._trials_left -= 1
        evaluation = evaluate_choice(
            self._step, choice, self._limits, memory_needs=self._needs(choice), max_waiting_s=spare_s
        )
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
        recompute_s = sum(
            forward_s
            for forward_s, policy in zip(step.forward_s, choice.activations, strict=True)
            if policy is ActivationPolicy.RECOMPUTE
        )
        work_s = step.table.micro_batches * (self._micro_batch_s + recompute_s) + min_update_s(step, choice.optimizer)
        if not step.rates.duplex and link_seconds(step, choice) > self._best.seconds:
            return -1.0
        return self._best.seconds - work_s

    def _search_counts(self, ahead: int, optimizer: OptimizerPlacement, evenly: bool) -> None:
        """Searches the numbers of streamed and of recomputed blocks: a coarse grid, then around its best points."""
        max_counts = (len(self._streaming_order), len(self._recompute_order))
        costs: dict[tuple[int, int], float] = {}

        def value(at: tuple[int, int]) -> float:
            if at not in costs:
                costs[at] = self._cost(self._build_choice(*at, ahead, optimizer, evenly))
            return costs[at]

        stride = [max(1, math.ceil(limit / 4)) for limit in max_counts]
        grid = [sorted({*range(0, limit + 1, by), limit}) for limit, by in zip(max_counts, stride, strict=True)]
        for at in product(*grid):
            value(at)
            if self._done:
                return
        ranked = sorted(costs, key=lambda key: (costs[key], key))
        # Also refine the best points with no block and with all blocks recomputed: the optimum is often at such an end.
        ends = [next(at for at in ranked if at[1] == end) for end in {0, max_counts[1]}]
        for start in dict.fromkeys([*ranked[:REFINED_GRID_POINTS], *sorted(ends)]):
            self._refine(start, (stride[0], stride[1]), (max_counts[0], max_counts[1]), value)

    def _refine(
        self,
        point: tuple[int, int],
        stride: tuple[int, int],
        max_counts: tuple[int, int],
        cost: Callable[[tuple[int, int]], float],
    ) -> None:
        """Pattern search: moves to the best of the eight neighbours; if none is better, halves the stride."""
        while not self._done:
            neighbours = [
                (point[0] + i * stride[0], point[1] + j * stride[1])
                for i, j in product((-1, 0, 1), repeat=2)
                if 0 <= point[0] + i * stride[0] <= max_counts[0] and 0 <= point[1] + j * stride[1] <= max_counts[1]
            ]
            better = min(neighbours, key=lambda key: (cost(key), key))
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
        count = len(self._step.weight_bytes)
        streamed, recomputed = (
            set(self._streaming_order[:streamed_count]),
            set(self._recompute_order[:recomputed_count]),
        )
        others = [b for b in reversed(range(count)) if b not in recomputed]
        if evenly:
            others = others[: ahead + 1] + evenly_spread_order(others[ahead + 1 :])

        def choice_keeping(kept: int) -> PlacementChoice:
            keep = set(others[:kept])
            policies = tuple(
                ActivationPolicy.RECOMPUTE
                if b in recomputed
                else ActivationPolicy.KEEP
                if b in keep or not self._can_send(b)
                else ActivationPolicy.SEND
                for b in range(count)
            )
            return PlacementChoice(
                tuple(b in streamed for b in range(count)), policies, ahead, optimizer, self._step.rates.has_link
            )

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

    def _can_send(self, block: int) -> bool:
        return ActivationPolicy.SEND in _activation_policies(self._step, block)

    def _fits_gpu(self, choice: PlacementChoice) -> bool:
        return self._needs(choice).gpu_bytes <= self._limits.gpu_bytes

    def _needs(self, choice: PlacementChoice) -> MemoryNeeds:
        memory_needs = self._needs_by_choice.get(choice)
        if memory_needs is None:
            memory_needs = self._needs_by_choice[choice] = compute_memory_needs(
                self._step, choice.without_immediate_refetches()
            )
        return memory_needs

    def _improve_single_blocks(self) -> None:
        """Local search: takes the first neighbour that is better, and starts again from it, until none is."""
        best = self._best
        while best is not None and not self._done:
            for neighbour in _neighbours(self._step, best.choice):
                self._cost(neighbour if self._fits_gpu(neighbour) else None)
                if self._done or self._best is not best:
                    break
            if self._best is best:
                return
            best = self._best


def _neighbours(step: TimedStep, choice: PlacementChoice) -> Iterator[PlacementChoice]:
    """Placements that differ in one block, then those in which two blocks are swapped."""
    for b in range(len(step.weight_bytes)):
        for policy in _activation_policies(step, b):
            if policy is not choice.activations[b]:
                yield replace(choice, activations=(*choice.activations[:b], policy, *choice.activations[b + 1 :]))
        for streamed in _streaming_options(step, b):
            if streamed is not choice.streamed[b]:
                yield replace(choice, streamed=(*choice.streamed[:b], streamed, *choice.streamed[b + 1 :]))
    for distance in (1, 2, 4, 8, 16):
        for b in range(len(step.weight_bytes) - distance):
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


def _rank_blocks(step: TimedStep, merit: Callable[[int], float], blocks: Sequence[int]) -> list[int]:
    """Blocks by merit, best first; blocks of equal merit (to 3 digits) in an evenly spread order."""
    blocks_by_merit: dict[float, list[int]] = {}
    for block in blocks:
        blocks_by_merit.setdefault(float(f"{merit(block):.3g}"), []).append(block)
    return [
        block
        for value in sorted(blocks_by_merit, reverse=True)
        for block in evenly_spread_order(blocks_by_merit[value])
    ]
