"""Builds the step table, which plans are made from, from a traced step: bytes and work of each block. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, groupby

import numpy as np
from numpy.typing import NDArray

from supertuner.plan.placement.step_table import BlockCosts, OperatorWork, StepTable
from supertuner.plan.trace.execution_trace import ExecutionTrace, StepPass, TensorKind, TraceSpan


def build_step_table(trace: ExecutionTrace, *, micro_batches: int = 1, idle_bytes: int = 0) -> StepTable:
    """The table of a step that was traced without recomputation, for windows of `micro_batches` micro-batches."""
    assert not any(one.step_pass is StepPass.RECOMPUTE for one in trace.spans), "the traced step must not recompute"
    owner, allocated, last = owning_blocks(trace), trace.allocated_bytes(), len(trace.blocks) - 1

    def bytes_by_block(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        totals = np.zeros(len(trace.blocks), dtype=np.int64)
        np.add.at(totals, owner[mask], allocated[mask])
        return totals

    columns = {kind: bytes_by_block(trace.kind == kind).tolist() for kind in TensorKind}
    saved, inputs = columns[TensorKind.ACTIVATION], bytes_by_block(owner != trace.block).tolist()
    temporaries = trace.live_bytes_of_kind(TensorKind.TEMPORARY)
    transient = temporaries + trace.live_bytes_of_kind(TensorKind.ACTIVATION)
    saved_so_far, turns = list(accumulate(saved)), _backward_turns(trace)
    peak = partial(_peak_live_bytes, transient)
    blocks = tuple(
        BlockCosts(
            name=name,
            frozen_bytes=columns[TensorKind.FROZEN][number],
            trained_bytes=columns[TensorKind.TRAINED][number],
            gradient_bytes=columns[TensorKind.GRADIENT][number],
            state_bytes=columns[TensorKind.STATE][number],
            saved_bytes=saved[number],
            input_bytes=inputs[number],
            forward=_block_work(trace, StepPass.FORWARD, number),
            backward=_block_work(trace, StepPass.BACKWARD, number),
            forward_peak_bytes=max(0, peak(trace.spans_in(StepPass.FORWARD, number)) - saved_so_far[number]),
            backward_peak_bytes=max(0, peak(turns[number]) - saved_so_far[number]),
            recomputable=0 < number < last,
        )
        for number, name in enumerate(trace.blocks)
    )
    return StepTable(
        phase=trace.phase,
        blocks=blocks,
        batch_bytes=sum(columns[TensorKind.BATCH]),
        micro_batches=micro_batches,
        update=trace.total_work(StepPass.UPDATE),
        update_peak_bytes=_peak_live_bytes(temporaries, (s for s in trace.spans if s.step_pass is StepPass.UPDATE)),
        idle_bytes=idle_bytes,
    )


def owning_blocks(trace: ExecutionTrace) -> NDArray[np.int64]:
    """For each tensor the block that it is counted with.

    An input of blocks is counted with the first of them, because that block would be recomputed from it. An activation
    that is made before all blocks and used by several is counted where it was made: it must be kept in any case.
    """
    owner = trace.block.astype(np.int64)
    input_tensors, receiving_blocks = trace.block_inputs[:, 0], trace.block_inputs[:, 1].astype(np.int64)
    first = np.full(len(owner), len(trace.blocks), dtype=np.int64)
    np.minimum.at(first, input_tensors, receiving_blocks)
    shared = np.bincount(input_tensors, minlength=len(owner)) > 1
    saved = trace.kind == TensorKind.ACTIVATION
    moves = (first < len(trace.blocks)) & (saved | (trace.kind == TensorKind.TEMPORARY))
    moves &= ~(shared & saved & (trace.block == 0)) & (first != trace.block)
    owner[moves] = first[moves]
    return owner


def _block_work(trace: ExecutionTrace, step_pass: StepPass, block: int) -> OperatorWork:
    return sum((one.work for one in trace.spans_in(step_pass, block)), OperatorWork())


def _backward_turns(trace: ExecutionTrace) -> list[list[TraceSpan]]:
    """For each block, the spans of the backward pass from its first operator until the next block begins.

    This includes spans outside all blocks, which run in between while earlier blocks still have their activations: they
    add up gradients of tensors that several blocks use.
    """
    turns: list[list[TraceSpan]] = [[] for _ in trace.blocks]
    for step_pass, one_pass in groupby(trace.spans, key=lambda span: span.step_pass):
        if step_pass is StepPass.BACKWARD:
            for turn, span in assign_turns(list(one_pass), len(trace.blocks) - 1):
                turns[turn].append(span)
    return turns


def assign_turns(one_pass: Sequence[TraceSpan], last: int) -> Iterator[tuple[int, TraceSpan]]:
    """Each span with the block whose backward pass it falls into.

    Read from the end of the pass, the blocks come in increasing order: a span belongs to the highest block seen so far.
    Spans before the first block's (in time) belong to `last`, those after the last one to block 0, whatever their own
    block is.
    """
    inner = [number for number, span in enumerate(one_pass) if 0 < span.block < last]
    begin = inner[0] if inner else len(one_pass)
    yield from ((last, span) for span in one_pass[:begin])
    turn = 0
    for span in reversed(one_pass[begin:]):
        turn = max(turn, span.block) if span.block < last else turn
        yield turn, span


def _peak_live_bytes(live: NDArray[np.int64], spans: Iterable[TraceSpan]) -> int:
    """The peak of `live` during these spans, whichever block allocated the bytes."""
    return max((int(live[one.begin : one.end + 1].max()) for one in spans), default=0)
