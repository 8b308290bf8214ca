"""What a run is moved by: the plan that was made, settings that ask for something else, or nothing at all."""

from __future__ import annotations

from typing import Any

import pytest

from supertuner.config.settings.plan import PlanSettings
from supertuner.core.errors import TrainError
from supertuner.models.blocks import named_blocks
from supertuner.plan.placement.plan import ActivationPolicy, BlockPlan, MemoryPlan, OptimizerPlacement, WeightPlacement
from supertuner.plan.placement.planner import apply_plan_settings
from supertuner.step.window import train_window
from supertuner.train.offload.manager import plan_summary
from tests.train.offload.making import (
    OffloadCase,
    a_plan,
    apply_plan_synchronously,
    assert_same,
    batch,
    outcome,
    window,
)

BLOCKS = ("blocks.0", "blocks.1")
PLANNED = MemoryPlan(
    "train",
    "gh200-96",
    True,
    (
        BlockPlan("(before)", WeightPlacement.GPU, ActivationPolicy.KEEP, "small"),
        BlockPlan("blocks.0", WeightPlacement.STREAMED, ActivationPolicy.SEND, "hidden"),
        BlockPlan("blocks.1", WeightPlacement.GPU, ActivationPolicy.KEEP, "fits"),
    ),
    2,
    OptimizerPlacement.GPU,
    True,
    None,
    ("a reason",),
)


def asked(planned: MemoryPlan | None, recomputing: bool = False, **settings: Any) -> MemoryPlan | None:
    return apply_plan_settings(PlanSettings(**settings), planned, BLOCKS, phase="train model", recompute=recomputing)


def test_without_a_plan_and_without_wishes_nothing_is_done() -> None:
    assert asked(None) is None and asked(None, recomputing=True) is None
    assert asked(PLANNED, act="never") is None


def test_a_plan_is_followed_as_it_is() -> None:
    assert asked(PLANNED) == PLANNED


def test_a_wish_goes_before_the_plan_and_says_so() -> None:
    found = asked(PLANNED, activations="recompute", idle_experts="gpu", ahead=0)
    assert found is not None
    before, first, second = found.blocks
    assert before == PLANNED.blocks[0], "what stands around the blocks is no block"
    assert (first.weights, first.activations, first.reason) == (
        WeightPlacement.STREAMED,
        ActivationPolicy.RECOMPUTE,
        "as configured",
    )
    assert second.activations is ActivationPolicy.RECOMPUTE
    assert (found.ahead, found.idle_at_home, found.modelled) == (0, False, None)
    assert "plan.activations: recompute" in found.reasons[0] and "plan.ahead: 0" in found.reasons[2]
    assert "a reason" not in found.reasons, "the planner's words are of another plan"


def test_a_wish_without_a_plan_leaves_everything_else_as_the_settings_have_it() -> None:
    found = asked(None, recomputing=True, optimizer="host")
    assert found is not None and found.stepping is OptimizerPlacement.HOST
    assert {row.activations for row in found.blocks} == {ActivationPolicy.RECOMPUTE}
    assert plan_summary(found) == "activations of 2 blocks recomputed; optimizer: host"


def test_wishes_without_effect_are_doubted() -> None:
    doubts = list(PlanSettings(act="never", weights="streamed").warnings())
    assert [doubt.field for doubt in doubts] == ["weights"]


def test_a_plan_of_another_model_is_refused_by_name() -> None:
    trainee = OffloadCase().expert_state()
    strange = MemoryPlan(
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
        apply_plan_synchronously(trainee, strange)


def test_what_cannot_be_followed_is_said() -> None:
    trainee = OffloadCase().expert_state()
    rows = (
        BlockPlan("(before)", WeightPlacement.STREAMED, ActivationPolicy.SEND, ""),
        *a_plan(trainee.module).blocks[1:],
    )
    acting = apply_plan_synchronously(trainee, MemoryPlan("t", "m", True, rows, 1, OptimizerPlacement.GPU, False, None))
    assert len(acting.unfollowed) == 2 and all("(before)" in line for line in acting.unfollowed)


def test_a_plan_that_does_nothing_installs_nothing() -> None:
    trainee = OffloadCase().expert_state()
    acting = apply_plan_synchronously(trainee, a_plan(trainee.module))
    assert acting.plan.keeps_all_on_gpu and acting.blocks is None and trainee.optimizer_offload is None
    assert not any("_compiled_call_impl" in vars(block) for block in trainee.module.modules())
    assert acting.host_buffers.memory.nbytes == 0


def test_a_plan_that_was_taken_off_leaves_nothing_behind() -> None:
    trainee = OffloadCase(kind="full").expert_state()
    acting = apply_plan_synchronously(
        trainee,
        a_plan(trainee.module, WeightPlacement.STREAMED, ActivationPolicy.SEND, stepping=OptimizerPlacement.HOST),
    )
    window(trainee, OffloadCase(kind="full").step_options(), 0)
    acting.restore_to_device()
    assert trainee.optimizer_offload is None
    assert all(block._compiled_call_impl is None for block in trainee.module.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in trainee.parameters.values())


@pytest.mark.filterwarnings("ignore")  # the compiler's own, about parts of torch
def test_compiled_blocks_are_moved_from_outside_and_give_the_same_bits() -> None:
    """The compiler sees the block alone: its code is the same with and without a plan. (Without inductor, which takes
    minutes here: what a plan touches is before it.)"""
    case = OffloadCase(dropout=0.0)
    trainees = [case.expert_state(), case.expert_state()]
    for trainee in trainees:
        for block in named_blocks(trainee.module).values():
            block.compile(backend="aot_eager")
    fates = (
        ActivationPolicy.SEND,
        ActivationPolicy.RECOMPUTE,
        ActivationPolicy.KEEP,
        ActivationPolicy.SEND,
        ActivationPolicy.RECOMPUTE,
    )
    blocks = list(named_blocks(trainees[1].module).values())
    compiled = [block._compiled_call_impl for block in blocks]
    acting = apply_plan_synchronously(trainees[1], a_plan(trainees[1].module, WeightPlacement.STREAMED, fates))
    for _ in range(2):  # of one shape: each other one is compiled again
        results = [
            train_window(trainee, [batch([1, 2])], samples=2, learning_rate=0.01, options=case.step_options(), seed=1)
            for trainee in trainees
        ]
        assert results[0] == results[1]
    assert_same(outcome(trainees[1]), outcome(trainees[0]))
    assert acting.transfer.counters.sent_bytes > 0
    acting.restore_to_device()
    assert [block._compiled_call_impl for block in blocks] == compiled
