"""A plan is applied to an expert, refused if it belongs to another model, and removed without a trace."""

from __future__ import annotations

import pytest

from supertuner.core.errors import TrainError
from supertuner.models.blocks import named_blocks
from supertuner.plan.placement.plan import ActivationPolicy, BlockPlan, MemoryPlan, OptimizerPlacement, WeightPlacement
from supertuner.step.train_step import train_window
from tests.train.offload.making import (
    OffloadCase,
    a_plan,
    apply_plan_synchronously,
    assert_same,
    batch,
    outcome,
    restore_to_device,
    window,
)


def test_a_plan_of_another_model_is_refused_with_the_name_of_the_missing_block() -> None:
    expert_state = OffloadCase().expert_state()
    other_plan = MemoryPlan(
        "t",
        "m",
        True,
        (BlockPlan("layers.3", WeightPlacement.GPU, ActivationPolicy.SEND, ""),),
        1,
        OptimizerPlacement.GPU,
        False,
        None,
    )
    with pytest.raises(TrainError, match=r"another model: WanTransformer3DModel has no block layers\.3"):
        apply_plan_synchronously(expert_state, other_plan)


def test_parts_of_a_plan_that_cannot_be_followed_are_reported() -> None:
    expert_state = OffloadCase().expert_state()
    rows = (
        BlockPlan("(before)", WeightPlacement.STREAMED, ActivationPolicy.SEND, ""),
        *a_plan(expert_state.module).blocks[1:],
    )
    offloaded = apply_plan_synchronously(
        expert_state, MemoryPlan("t", "m", True, rows, 1, OptimizerPlacement.GPU, False, None)
    )
    assert len(offloaded.unfollowed) == 2 and all("(before)" in line for line in offloaded.unfollowed)


def test_a_plan_that_keeps_all_on_the_gpu_installs_nothing() -> None:
    expert_state = OffloadCase().expert_state()
    offloaded = apply_plan_synchronously(expert_state, a_plan(expert_state.module))
    assert offloaded.plan.keeps_all_on_gpu and offloaded.blocks is None and expert_state.optimizer_offload is None
    assert not any("_compiled_call_impl" in vars(block) for block in expert_state.module.modules())
    assert offloaded.host_buffers.memory.nbytes == 0


def test_a_plan_that_is_removed_leaves_no_hooks() -> None:
    expert_state = OffloadCase(kind="full").expert_state()
    offloaded = apply_plan_synchronously(
        expert_state,
        a_plan(expert_state.module, WeightPlacement.STREAMED, ActivationPolicy.SEND, stepping=OptimizerPlacement.HOST),
    )
    window(expert_state, OffloadCase(kind="full").step_options(), 0)
    restore_to_device(offloaded)
    assert expert_state.optimizer_offload is None
    assert all(block._compiled_call_impl is None for block in expert_state.module.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in expert_state.parameters.values())


@pytest.mark.filterwarnings("ignore")  # warnings of the compiler about torch itself
def test_compiled_blocks_under_a_plan_compute_the_same_bits() -> None:
    """The compiler sees only the block: its code is the same with and without a plan. (Without inductor, which takes
    minutes here: a plan manager before it.)"""
    case = OffloadCase(dropout=0.0)
    expert_states = [case.expert_state(), case.expert_state()]
    for expert_state in expert_states:
        for block in named_blocks(expert_state.module).values():
            block.compile(backend="aot_eager")
    policies = (
        ActivationPolicy.SEND,
        ActivationPolicy.RECOMPUTE,
        ActivationPolicy.KEEP,
        ActivationPolicy.SEND,
        ActivationPolicy.RECOMPUTE,
    )
    blocks = list(named_blocks(expert_states[1].module).values())
    compiled = [block._compiled_call_impl for block in blocks]
    offloaded = apply_plan_synchronously(
        expert_states[1], a_plan(expert_states[1].module, WeightPlacement.STREAMED, policies)
    )
    for _ in range(2):  # batches of one shape, so that nothing is compiled again
        results = [
            train_window(
                expert_state, [batch([1, 2])], samples=2, learning_rate=0.01, options=case.step_options(), seed=1
            )
            for expert_state in expert_states
        ]
        assert results[0] == results[1]
    assert_same(outcome(expert_states[1]), outcome(expert_states[0]))
    assert offloaded.transfer.counters.sent_bytes > 0
    restore_to_device(offloaded)
    assert [block._compiled_call_impl for block in blocks] == compiled
