"""What torch's caching allocator reserves for a step that follows a plan: the trace of the step without a plan is
replayed with the allocations that the plan changes. Pure.

The arithmetic of a plan (`placement/memory_needs.py`) counts live bytes. The GPU must also hold the gaps between them,
and a plan changes when and in which order tensors come and go. The replay follows `train/offload`, which allocates
everything on the compute stream:

- Weights of streamed blocks are not on the GPU; the slots that they are copied into are allocated at the first use.
- A block that is recomputed does not keep its activations in its forward pass. It keeps its inputs, and makes its
  activations again at the start of its backward pass.
- A block that sends its activations keeps them until a later block has sent. They are allocated again when the block
  `ahead` blocks after it begins its backward pass.
- Gradients and optimizer state that live in host memory are on the GPU while they are copied or updated.

On the phantom, the result was within 0.8 % of torch's own allocator (docs/forecast.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from supertuner.plan.placement.memory_needs import MAX_COPIES_IN_FLIGHT, MIN_OFFLOAD_BYTES, UPDATE_PIECE_BYTES
from supertuner.plan.placement.plan import ActivationPolicy, MemoryPlan, OptimizerPlacement, WeightPlacement
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.trace.caching_allocator import (
    AllocatorBlock,
    AllocatorOutOfMemory,
    AllocatorPeaks,
    CachingAllocator,
    allocation_events,
)
from supertuner.plan.trace.execution_trace import ExecutionTrace, StepPass, TensorKind
from supertuner.plan.trace.step_table_builder import assign_turns, owning_blocks

REPLAYED_WINDOWS: Final = 2
"""The first update allocates the optimizer state, and the second window finds the segments of the first."""
REPLAYED_MICRO_BATCHES: Final = 2
"""Of each window: from the second on, they are alike."""
UNSAVED_ACTIVATIONS: Final = 3
"""Activations that a block holds at once in a forward pass that saves none, in its local variables. The trace does not
have that pass; with 1 to 4, the replay of ten steps stayed within 0.6 % of torch's allocator on the phantom."""


class BlockTurn(NamedTuple):
    """The time in which one block computes its forward or its backward pass."""

    begin: int
    """Tick."""
    block: int
    backward: bool


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A step that was traced without recomputation, prepared for replays under any plan."""

    trace: ExecutionTrace
    table: StepTable
    """Of the same trace, with the micro-batches of a window and the idle experts of the run."""

    def reserved_bytes(self, plan: MemoryPlan, limit_bytes: int | None = None) -> int | None:
        """The peak of reserved bytes under a plan; None: it exceeds the limit even if cached memory is released."""
        peaks = self.simulate(plan, limit_bytes)
        return peaks.reserved_bytes if peaks.fits else None

    def simulate(self, plan: MemoryPlan, limit_bytes: int | None = None) -> AllocatorPeaks:
        """The allocator's counters over the first windows of a run that follows the plan."""
        allocator = CachingAllocator(limit_bytes)
        fits = True
        try:
            _PlannedReplay(self, plan, allocator).run()
        except AllocatorOutOfMemory:
            fits = False
        return AllocatorPeaks(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, allocator.retries, fits)

    @cached_property
    def nbytes(self) -> list[int]:
        return list(map(int, self.trace.nbytes))

    @cached_property
    def kinds(self) -> list[int]:
        return list(map(int, self.trace.kind))

    @cached_property
    def blocks(self) -> list[int]:
        return list(map(int, self.trace.block))

    @cached_property
    def events(self) -> tuple[list[tuple[int, bool, int]], list[tuple[int, bool, int]]]:
        """(tick, is allocation, tensor) of the passes, and of the update."""
        events = allocation_events(self.trace)
        update = min(
            (one.begin for one in self.trace.spans if one.step_pass is StepPass.UPDATE), default=self.trace.end
        )
        first = next((number for number, event in enumerate(events) if event[0] > update), len(events))
        return events[:first], events[first:]

    @cached_property
    def turns(self) -> list[BlockTurn]:
        """In the order of time."""
        spans, last = self.trace.spans, len(self.trace.blocks) - 1
        forward = [(span.begin, span.block) for span in spans if span.step_pass is StepPass.FORWARD]
        backward_spans = [span for span in spans if span.step_pass is StepPass.BACKWARD]
        backward = sorted((span.begin, block) for block, span in assign_turns(backward_spans, last))
        turns: list[BlockTurn] = []
        for begin, block, is_backward in [*((*one, False) for one in forward), *((*one, True) for one in backward)]:
            if not turns or (turns[-1].block, turns[-1].backward) != (block, is_backward):
                turns.append(BlockTurn(begin, block, is_backward))
        return turns

    @cached_property
    def forward_events(self) -> list[list[tuple[bool, int]]]:
        """By block: (is allocation, tensor) of the tensors that are made in its forward pass and not used by others."""
        events: list[list[tuple[bool, int]]] = [[] for _ in self.trace.blocks]
        turns, position = self.turns, -1
        for tick, is_birth, number in self.events[0]:
            while position + 1 < len(turns) and turns[position + 1].begin < tick:
                position += 1
            if position >= 0 and not turns[position].backward and number not in self.passed_on:
                events[turns[position].block].append((is_birth, number))
        return events

    @cached_property
    def passed_on(self) -> set[int]:
        """Tensors that the forward pass of one block makes and that of another uses."""
        blocks, tensors = self.blocks, set(self.trace.block_inputs[:, 0].tolist())
        for span in self.trace.spans:
            if span.step_pass is StepPass.FORWARD:
                tensors.update(number for number in span.touched_tensors if blocks[number] != span.block)
        return tensors

    @cached_property
    def inputs(self) -> list[list[int]]:
        """By block: its inputs that are made within the step."""
        inputs: list[list[int]] = [[] for _ in self.trace.blocks]
        for tensor, block in self.trace.block_inputs.tolist():
            if self.trace.birth[tensor] > 0:
                inputs[block].append(tensor)
        return inputs

    @cached_property
    def sendable(self) -> list[list[int]]:
        """By block: the activations that are copied to the host if the block sends them."""
        tensors: list[list[int]] = [[] for _ in self.trace.blocks]
        large = (self.trace.kind == TensorKind.ACTIVATION) & (self.trace.nbytes >= MIN_OFFLOAD_BYTES)
        owners = owning_blocks(self.trace)
        for number in np.flatnonzero(large & (self.trace.birth > 0)).tolist():
            tensors[owners[number]].append(number)
        return tensors

    def initial(self, *kinds: TensorKind) -> list[int]:
        """The tensors of these classes that exist before the step."""
        return np.flatnonzero((self.trace.birth == 0) & np.isin(self.trace.kind, kinds)).tolist()


@dataclass(eq=False, slots=True)
class _PlannedReplay:
    """One replay: allocates and frees in the order of a run that follows the plan."""

    step: TracedStep
    plan: MemoryPlan
    allocator: CachingAllocator
    live: dict[int, AllocatorBlock] = field(default_factory=dict)
    """Tensor → its memory, for tensors that come and go."""
    held_until: dict[int, int] = field(default_factory=dict)
    """Tensor → block: it stays until that block's backward pass ends, also if the trace frees it before."""
    held: dict[int, list[int]] = field(default_factory=dict)
    """Block → tensors that the trace has freed and that stay until the end of its backward pass."""
    unsaved: deque[int] = field(default_factory=deque)
    """Activations of a forward pass that saves none."""
    sending: deque[int] = field(default_factory=deque)
    """Blocks whose activations are on their way to the host."""
    on_host: dict[int, list[int]] = field(default_factory=dict)
    """Block → its activations that are only in host memory."""
    copies: deque[list[AllocatorBlock]] = field(default_factory=deque)
    """Device memory of copies to the host that may still run."""

    def run(self) -> None:
        self._allocate_resident()
        micro_batches = min(self.step.table.micro_batches, REPLAYED_MICRO_BATCHES)
        for window in range(REPLAYED_WINDOWS):
            for number in range(micro_batches):
                self._replay_passes(first=number == 0)
            self._finish_copies()
            if window == 0 and self.plan.stepping is OptimizerPlacement.GPU:
                self._allocate_all(self.step.initial(TensorKind.STATE))
            self._replay_update()
            for number in list(self.live):
                self._free(number)

    def _allocate_resident(self) -> None:
        """What stays on the GPU, and the slots of streamed weights."""
        step, table = self.step, self.step.table
        streamed = {TensorKind.FROZEN: self._streams_weights, TensorKind.TRAINED: self._streams_trained}
        for number in step.initial(*(kind for kind in TensorKind if kind is not TensorKind.STATE)):
            is_streamed = streamed.get(TensorKind(step.kinds[number]))
            if is_streamed is None or not is_streamed(step.blocks[number]):
                self.allocator.allocate(step.nbytes[number])
        if table.idle_bytes and not self.plan.idle_at_home:
            self.allocator.allocate(table.idle_bytes)
        slot_bytes = [
            one.frozen_bytes + (one.trained_bytes if self._streams_trained(block) else 0)
            for block, one in enumerate(table.blocks)
            if self._streams_weights(block)
        ]
        for _ in range(min(self.plan.ahead + 1, len(slot_bytes))):
            self.allocator.allocate(max(slot_bytes))

    def _streams_weights(self, block: int) -> bool:
        return self.plan.blocks[block].weights is WeightPlacement.STREAMED

    def _streams_trained(self, block: int) -> bool:
        costs = self.step.table.blocks[block]
        return self._streams_weights(block) and costs.trained_bytes > costs.frozen_bytes

    def _policy(self, block: int) -> ActivationPolicy:
        return self.plan.blocks[block].activations

    # ── passes ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _replay_passes(self, first: bool) -> None:
        """The forward and the backward pass of one micro-batch; `first`: of its window."""
        step, turns, position = self.step, self.step.turns, -1
        self.held_until = {
            tensor: block
            for block in reversed(range(len(step.inputs)))
            if self._policy(block) is ActivationPolicy.RECOMPUTE
            for tensor in step.inputs[block]
        }
        for tick, is_birth, number in step.events[0]:
            while position + 1 < len(turns) and turns[position + 1].begin < tick:
                if position >= 0:
                    self._end_turn(turns[position])
                position += 1
                self._begin_turn(turns[position])
            if not is_birth:
                if number in self.held_until:
                    self.held.setdefault(self.held_until[number], []).append(number)
                else:
                    self._free(number)
            elif step.kinds[number] == TensorKind.GRADIENT:
                self._make_gradient(number, first)
            else:
                self._allocate(number)
                if position >= 0 and not turns[position].backward:
                    self._drop_unsaved(number, turns[position].block)
        if position >= 0:
            self._end_turn(turns[position])

    def _drop_unsaved(self, made: int, block: int) -> None:
        """`made` was made in the forward pass of a block. If the block is recomputed, nothing saves it."""
        is_activation = self.step.kinds[made] == TensorKind.ACTIVATION and made not in self.step.passed_on
        if is_activation and self._policy(block) is ActivationPolicy.RECOMPUTE:
            self.unsaved.append(made)
            if len(self.unsaved) > UNSAVED_ACTIVATIONS:
                self._free(self.unsaved.popleft())

    def _begin_turn(self, turn: BlockTurn) -> None:
        if not turn.backward:
            return
        # Activations that no later block pushed out are still on the GPU, until their block's backward pass ends.
        for block in self.sending:
            self.held_until |= {number: block for number in self.step.sendable[block] if number in self.live}
        self.sending.clear()
        for block in range(turn.block, max(0, turn.block - self.plan.ahead) - 1, -1):
            self._allocate_all(self.on_host.pop(block, ()), tracked=True)
        if self._policy(turn.block) is ActivationPolicy.RECOMPUTE:
            for is_birth, number in self.step.forward_events[turn.block]:
                if is_birth:
                    self._allocate(number)
                else:
                    self._free(number)

    def _end_turn(self, turn: BlockTurn) -> None:
        if turn.backward:
            for number in self.held.pop(turn.block, ()):
                self._free(number)
            return
        policy = self._policy(turn.block)
        if policy is not ActivationPolicy.KEEP:
            while self.unsaved:
                self._free(self.unsaved.popleft())
            # autocast's copies of trained weights: the trace frees them at the end of the forward pass
            for is_birth, number in self.step.forward_events[turn.block]:
                if is_birth and self.step.kinds[number] == TensorKind.TEMPORARY:
                    self._free(number)
        if policy is ActivationPolicy.SEND:
            self.sending.append(turn.block)
            while len(self.sending) > max(1, self.plan.ahead):
                block = self.sending.popleft()
                self.on_host[block] = [number for number in self.step.sendable[block] if number in self.live]
                for number in self.on_host[block]:
                    self._free(number)

    # ── gradients and the update ─────────────────────────────────────────────────────────────────────────────────

    def _make_gradient(self, number: int, first: bool) -> None:
        """A gradient of a later micro-batch is added to the one of the first: on the GPU, or to a copy of it."""
        nbytes = self.step.nbytes[number]
        gradient = self.allocator.allocate(nbytes)
        if self._gradient_on_host(self.step.blocks[number]):
            if not first:
                accumulated = self.allocator.allocate(nbytes)
                self.allocator.free(gradient)
                gradient = accumulated
            self._copy_to_host([gradient])
        elif number in self.live:
            self.allocator.free(gradient)
        else:
            self.live[number] = gradient

    def _gradient_on_host(self, block: int) -> bool:
        return self.plan.stepping is OptimizerPlacement.HOST or self._streams_trained(block)

    def _copy_to_host(self, blocks: list[AllocatorBlock]) -> None:
        self.copies.append(blocks)
        while len(self.copies) > MAX_COPIES_IN_FLIGHT:
            self._free_blocks(self.copies.popleft())

    def _finish_copies(self) -> None:
        while self.copies:
            self._free_blocks(self.copies.popleft())

    def _replay_update(self) -> None:
        streams_trained = any(map(self._streams_trained, range(len(self.plan.blocks))))
        if self.plan.stepping is OptimizerPlacement.STREAMED or (
            self.plan.stepping is OptimizerPlacement.GPU and streams_trained
        ):
            self._replay_pieces()
        elif self.plan.stepping is OptimizerPlacement.GPU:
            for _, is_birth, number in self.step.events[1]:
                if is_birth:
                    self._allocate(number)
                else:
                    self._free(number)

    def _replay_pieces(self) -> None:
        """Each piece is fetched while the one before is updated, and sent back while the next one is."""
        temporary_share = self.step.table.update_peak_bytes / max(
            1, sum(b.trained_bytes for b in self.step.table.blocks)
        )
        pieces = list(self._update_pieces())
        fetched = self._fetch_piece(pieces[0]) if pieces else []
        for number, (trained, _, _) in enumerate(pieces):
            current, fetched = fetched, self._fetch_piece(pieces[number + 1]) if number + 1 < len(pieces) else []
            self._free_blocks([self.allocator.allocate(int(nbytes * temporary_share)) for nbytes in trained])
            self._copy_to_host(current)
        self._finish_copies()

    def _update_pieces(self) -> Iterable[tuple[list[int], list[int], bool]]:
        """(bytes of trained tensors, bytes of their state, whether weights and gradients are in host memory)."""
        step = self.step
        by_block: dict[int, tuple[list[int], list[int]]] = {}
        for number in step.initial(TensorKind.TRAINED):
            by_block.setdefault(step.blocks[number], ([], []))[0].append(step.nbytes[number])
        for number in step.initial(TensorKind.STATE):
            if step.blocks[number] in by_block:
                by_block[step.blocks[number]][1].append(step.nbytes[number])
        everything: tuple[list[int], list[int]] = ([], [])
        for block, (trained, state) in sorted(by_block.items()):
            if not step.table.by_pieces:
                everything[0].extend(trained)
                everything[1].extend(state)
                continue
            for begin, end in _split_sizes(trained, UPDATE_PIECE_BYTES):
                of_piece = slice(begin * len(state) // len(trained), end * len(state) // len(trained))
                yield trained[begin:end], state[of_piece], self._streams_trained(block)
        if everything[0]:
            yield *everything, any(map(self._streams_trained, by_block))

    def _fetch_piece(self, piece: tuple[list[int], list[int], bool]) -> list[AllocatorBlock]:
        trained, state, weights_on_host = piece
        sizes = 2 * trained if weights_on_host else []  # the weights and their gradients
        sizes = sizes + (state if self.plan.stepping is OptimizerPlacement.STREAMED else [])
        return [self.allocator.allocate(nbytes) for nbytes in sizes]

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _allocate(self, number: int) -> None:
        self._free(number)  # one of an earlier micro-batch
        self.live[number] = self.allocator.allocate(self.step.nbytes[number])

    def _allocate_all(self, numbers: Iterable[int], *, tracked: bool = False) -> None:
        for number in numbers:
            if tracked:
                self._allocate(number)
            else:
                self.allocator.allocate(self.step.nbytes[number])

    def _free(self, number: int) -> None:
        block = self.live.pop(number, None)
        if block is not None:
            self.allocator.free(block)

    def _free_blocks(self, blocks: Iterable[AllocatorBlock]) -> None:
        for block in blocks:
            self.allocator.free(block)


def _split_sizes(sizes: Sequence[int], piece_bytes: int) -> Iterable[tuple[int, int]]:
    """Ranges of `sizes` of about `piece_bytes` each, as `train/offload/apply.py` splits parameters."""
    begin, room_bytes = 0, piece_bytes
    for number, nbytes in enumerate(sizes):
        if nbytes > room_bytes and number > begin:
            yield begin, number
            begin, room_bytes = number, piece_bytes
        room_bytes -= nbytes
    if sizes:
        yield begin, len(sizes)
