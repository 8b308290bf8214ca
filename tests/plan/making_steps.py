"""Step tables, rates and placements for tests of planning: with round numbers, to check by hand, and random ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from supertuner.plan.placement.choice import PlacementChoice
from supertuner.plan.placement.plan import ActivationPolicy, OptimizerPlacement
from supertuner.plan.placement.step_table import BlockCosts, OperatorWork, StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits

ROUND = MachineRates(
    matmul_flops=1.0, other_flops=None, gpu_bytes_s=1e9, host_bytes_s=1000.0, to_device_bytes_s=100.0,
    to_host_bytes_s=50.0, one_pool=False,
)  # fmt: skip
"""1 operation/s, 100 bytes/s to the GPU, 50 bytes/s to the host: times can be computed in the head."""
AMPLE = MemoryLimits(10**9, 10**9)
PLAIN = BlockCosts(
    name="block", frozen_bytes=100, trained_bytes=0, gradient_bytes=0, state_bytes=0, saved_bytes=100, input_bytes=10,
    forward=OperatorWork(2.0), backward=OperatorWork(4.0), forward_peak_bytes=0, backward_peak_bytes=0,
)  # fmt: skip
"""2 s forward, 4 s backward."""


def a_step(*blocks: BlockCosts, update_s: float = 1.0, **more: Any) -> StepTable:
    named = tuple(replace(block, name=f"blocks.{number}") for number, block in enumerate(blocks))
    fields = {"batch_bytes": 0, "micro_batches": 1, "update_peak_bytes": 0, **more}
    return StepTable("train model", named, update=OperatorWork(update_s), **fields)


def a_choice(
    policies: str, streamed: str = "", ahead: int = 1, stepping: OptimizerPlacement = OptimizerPlacement.GPU
) -> PlacementChoice:
    """`policies`: K keep, S send, R recompute, one letter per block; `streamed`: x for a block with streamed
    weights."""
    letters = {"K": ActivationPolicy.KEEP, "S": ActivationPolicy.SEND, "R": ActivationPolicy.RECOMPUTE}
    is_streamed = tuple(letter == "x" for letter in (streamed or "." * len(policies)))
    return PlacementChoice(is_streamed, tuple(letters[letter] for letter in policies), ahead, stepping, True)


sizes = st.integers(0, 60)
seconds = st.floats(0.0, 5.0)


@st.composite
def blocks(draw: st.DrawFn, trained: bool) -> BlockCosts:
    saved = draw(sizes)
    trained_bytes = draw(st.integers(1, 40)) if trained else 0
    return BlockCosts(
        name="block",
        frozen_bytes=draw(sizes),
        trained_bytes=trained_bytes,
        gradient_bytes=trained_bytes,
        state_bytes=draw(st.integers(0, 2)) * trained_bytes,
        saved_bytes=saved,
        input_bytes=draw(st.integers(0, saved)),
        forward=OperatorWork(draw(seconds)),
        backward=OperatorWork(draw(seconds)),
        forward_peak_bytes=draw(st.integers(0, 20)),
        backward_peak_bytes=draw(st.integers(0, 20)),
        recomputable=draw(st.booleans()),
    )


@st.composite
def tables(draw: st.DrawFn, trained: bool | None = None, most: int = 6) -> StepTable:
    has_trained = draw(st.booleans()) if trained is None else trained
    drawn_blocks = draw(st.lists(blocks(has_trained), min_size=1, max_size=most))
    return a_step(
        *drawn_blocks,
        update_s=draw(st.floats(0.0, 3.0)),
        batch_bytes=draw(st.integers(0, 5)),
        micro_batches=draw(st.integers(1, 5)),
        update_peak_bytes=draw(st.integers(0, 10)),
        idle_bytes=draw(sizes),
    )


@st.composite
def rates(draw: st.DrawFn) -> MachineRates:
    speed = st.floats(5.0, 500.0)
    return MachineRates(
        matmul_flops=1.0,
        other_flops=None,
        gpu_bytes_s=1e9,
        host_bytes_s=draw(st.floats(500.0, 5000.0)),
        to_device_bytes_s=draw(speed),
        to_host_bytes_s=draw(speed),
        one_pool=False,
        duplex=draw(st.booleans()),
    )


@st.composite
def choices(draw: st.DrawFn, table: StepTable) -> PlacementChoice:
    policies = tuple(
        draw(
            st.sampled_from(
                list(ActivationPolicy) if block.recomputable else [ActivationPolicy.KEEP, ActivationPolicy.SEND]
            )
        )
        for block in table.blocks
    )
    streamed = tuple(draw(st.booleans()) for _ in table.blocks)
    stepping = (
        draw(st.sampled_from(list(OptimizerPlacement)))
        if any(b.trained_bytes for b in table.blocks)
        else OptimizerPlacement.GPU
    )
    return PlacementChoice(streamed, policies, draw(st.integers(0, 3)), stepping, draw(st.booleans()))
