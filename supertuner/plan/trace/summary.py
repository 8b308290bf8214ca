"""A traced step as the table that plans are made from: block by block, what is kept, how much is worked. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from supertuner.plan.placement.step_table import Block, StepTable, Work
from supertuner.plan.trace.record import AFTER, BEFORE, Kind, Pass, Stretch, Trace


def table_of(trace: Trace, *, micro_batches: int = 1, idle_bytes: int = 0) -> StepTable:
    """The step of a trace in which nothing is recomputed, for windows of so many micro-batches."""
    assert not any(one.during is Pass.RECOMPUTE for one in trace.stretches), "a table is of a step that keeps all"
    holder = _holders(trace)
    taken = trace.taken()

    def held(kind: Kind) -> NDArray[np.int64]:
        return _by_block(trace, taken, holder, trace.kind == kind)

    saved = held(Kind.ACTIVATION)
    inputs = _by_block(trace, taken, holder, holder != trace.block)
    columns = {kind: held(kind) for kind in (Kind.FROZEN, Kind.TRAINED, Kind.GRADIENT, Kind.STATE)}
    temporaries = trace.live_of(Kind.TEMPORARY)
    passing, so_far = temporaries + trace.live_of(Kind.ACTIVATION), np.cumsum(saved)
    turns = _turns(trace)
    blocks = tuple(
        Block(
            name=name,
            frozen_bytes=int(columns[Kind.FROZEN][number]),
            trained_bytes=int(columns[Kind.TRAINED][number]),
            gradient_bytes=int(columns[Kind.GRADIENT][number]),
            state_bytes=int(columns[Kind.STATE][number]),
            saved_bytes=int(saved[number]),
            input_bytes=int(inputs[number]),
            forward=_worked(trace, Pass.FORWARD, number),
            backward=_worked(trace, Pass.BACKWARD, number),
            forward_peak_bytes=max(_most(passing, trace.of(Pass.FORWARD, number)) - int(so_far[number]), 0),
            backward_peak_bytes=max(_most(passing, turns[number]) - int(so_far[number]), 0),
            recomputable=name not in (BEFORE, AFTER),
        )
        for number, name in enumerate(trace.blocks)
    )
    return StepTable(
        phase=trace.phase,
        blocks=blocks,
        batch_bytes=int(taken[trace.kind == Kind.BATCH].sum()),
        micro_batches=micro_batches,
        update=trace.work(Pass.UPDATE),
        update_peak_bytes=max(
            (int(temporaries[s.begin : s.end + 1].max()) for s in trace.stretches if s.during is Pass.UPDATE),
            default=0,
        ),
        idle_bytes=idle_bytes,
    )


def _holders(trace: Trace) -> NDArray[np.int64]:
    """For each tensor the block that it is counted with: what blocks are given is counted with the first of them, as it
    is what that one would be recomputed from. What is made before all blocks, saved, and given to several stays where
    it was made: no recomputation begins there."""
    holder = trace.block.astype(np.int64)
    given, taker = trace.inputs[:, 0], trace.inputs[:, 1].astype(np.int64)
    first = np.full(len(holder), len(trace.blocks), dtype=np.int64)
    np.minimum.at(first, given, taker)
    several = np.bincount(given, minlength=len(holder)) > 1
    saved = trace.kind == Kind.ACTIVATION
    moves = (first < len(trace.blocks)) & (saved | (trace.kind == Kind.TEMPORARY))
    moves &= ~(several & saved & (trace.block == 0)) & (first != trace.block)
    holder[moves] = first[moves]
    return holder


def _by_block(
    trace: Trace, taken: NDArray[np.int64], holder: NDArray[np.int64], which: NDArray[np.bool_]
) -> NDArray[np.int64]:
    found = np.zeros(len(trace.blocks), dtype=np.int64)
    np.add.at(found, holder[which], taken[which])
    return found


def _worked(trace: Trace, during: Pass, block: int) -> Work:
    return sum((one.work for one in trace.of(during, block)), Work())


def _turns(trace: Trace) -> list[list[Stretch]]:
    """For each block what the backward pass does while it is there: until the next block's turn. What belongs to no
    block is done in between too, while earlier blocks still have their activations: gradients of what several blocks
    are given are added up so."""
    found: list[list[Stretch]] = [[] for _ in trace.blocks]
    for during, one_pass in groupby(trace.stretches, key=lambda stretch: stretch.during):
        if during is Pass.BACKWARD:
            for turn, stretch in _in_turn(list(one_pass), len(trace.blocks) - 1):
                found[turn].append(stretch)
    return found


def _in_turn(one_pass: Sequence[Stretch], last: int) -> Iterator[tuple[int, Stretch]]:
    """With the block whose turn it is. The end of the pass is no block's, whosever its last operators are."""
    inner = [number for number, stretch in enumerate(one_pass) if 0 < stretch.block < last]
    begin = inner[0] if inner else len(one_pass)
    yield from ((last, stretch) for stretch in one_pass[:begin])
    turn = 0
    for stretch in reversed(one_pass[begin:]):
        turn = max(turn, stretch.block) if stretch.block < last else turn
        yield turn, stretch


def _most(live: NDArray[np.int64], stretches: Iterable[Stretch]) -> int:
    """The most bytes of a kind while these run, whoever made them."""
    return max((int(live[one.begin : one.end + 1].max()) for one in stretches), default=0)
