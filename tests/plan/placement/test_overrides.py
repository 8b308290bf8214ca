"""What a run is moved by: the plan that was made, settings that ask for something else, or nothing at all."""

from __future__ import annotations

from typing import Any

import pytest

from supertuner.config.settings.plan import PlanSettings
from supertuner.core.errors import TrainError
from supertuner.models.blocks import blocks_of
from supertuner.plan.placement.overrides import wished
from supertuner.plan.placement.plan import BlockPlan, Fate, Plan, Residence, Stepping
from supertuner.step.window import train_window
from supertuner.train.offload.manager import told
from tests.train.offload.making import Case, a_plan, acted, batch, outcome, same, window

BLOCKS = ("blocks.0", "blocks.1")
PLANNED = Plan(
    "train",
    "gh200-96",
    True,
    (
        BlockPlan("(before)", Residence.GPU, Fate.KEEP, "small"),
        BlockPlan("blocks.0", Residence.STREAMED, Fate.SEND, "hidden"),
        BlockPlan("blocks.1", Residence.GPU, Fate.KEEP, "fits"),
    ),
    2,
    Stepping.GPU,
    True,
    None,
    ("a reason",),
)


def asked(planned: Plan | None, recomputing: bool = False, **settings: Any) -> Plan | None:
    return wished(PlanSettings(**settings), planned, BLOCKS, phase="train model", recomputing=recomputing)


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
    assert (first.weights, first.activations, first.reason) == (Residence.STREAMED, Fate.RECOMPUTE, "as configured")
    assert second.activations is Fate.RECOMPUTE
    assert (found.ahead, found.idle_at_home, found.modelled) == (0, False, None)
    assert "plan.activations: recompute" in found.reasons[0] and "plan.ahead: 0" in found.reasons[2]
    assert "a reason" not in found.reasons, "the planner's words are of another plan"


def test_a_wish_without_a_plan_leaves_everything_else_as_the_settings_have_it() -> None:
    found = asked(None, recomputing=True, optimizer="host")
    assert found is not None and found.stepping is Stepping.HOST
    assert {row.activations for row in found.blocks} == {Fate.RECOMPUTE}
    assert told(found) == "activations of 2 blocks recomputed; optimizer: host"


def test_wishes_without_effect_are_doubted() -> None:
    doubts = list(PlanSettings(act="never", weights="streamed").doubts())
    assert [doubt.field for doubt in doubts] == ["weights"]


def test_a_plan_of_another_model_is_refused_by_name() -> None:
    trainee = Case().trainee()
    strange = Plan("t", "m", True, (BlockPlan("layers.3", Residence.GPU, Fate.SEND, ""),), 1, Stepping.GPU, False, None)
    with pytest.raises(TrainError, match=r"another model: WanTransformer3DModel has no block layers\.3"):
        acted(trainee, strange)


def test_what_cannot_be_followed_is_said() -> None:
    trainee = Case().trainee()
    rows = (BlockPlan("(before)", Residence.STREAMED, Fate.SEND, ""), *a_plan(trainee.module).blocks[1:])
    acting = acted(trainee, Plan("t", "m", True, rows, 1, Stepping.GPU, False, None))
    assert len(acting.refused) == 2 and all("(before)" in line for line in acting.refused)


def test_a_plan_that_does_nothing_installs_nothing() -> None:
    trainee = Case().trainee()
    acting = acted(trainee, a_plan(trainee.module))
    assert acting.plan.does_nothing and acting.blocks is None and trainee.keeper is None
    assert not any("_compiled_call_impl" in vars(block) for block in trainee.module.modules())
    assert acting.homes.host.nbytes == 0


def test_a_plan_that_was_taken_off_leaves_nothing_behind() -> None:
    trainee = Case(kind="full").trainee()
    acting = acted(trainee, a_plan(trainee.module, Residence.STREAMED, Fate.SEND, stepping=Stepping.HOST))
    window(trainee, Case(kind="full").rules(), 0)
    acting.remove()
    assert trainee.keeper is None
    assert all(block._compiled_call_impl is None for block in trainee.module.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in trainee.parameters.values())


@pytest.mark.filterwarnings("ignore")  # the compiler's own, about parts of torch
def test_compiled_blocks_are_moved_from_outside_and_give_the_same_bits() -> None:
    """The compiler sees the block alone: its code is the same with and without a plan. (Without inductor, which takes
    minutes here: what a plan touches is before it.)"""
    case = Case(dropout=0.0)
    trainees = [case.trainee(), case.trainee()]
    for trainee in trainees:
        for block in blocks_of(trainee.module).values():
            block.compile(backend="aot_eager")
    fates = (Fate.SEND, Fate.RECOMPUTE, Fate.KEEP, Fate.SEND, Fate.RECOMPUTE)
    blocks = list(blocks_of(trainees[1].module).values())
    compiled = [block._compiled_call_impl for block in blocks]
    acting = acted(trainees[1], a_plan(trainees[1].module, Residence.STREAMED, fates))
    for _ in range(2):  # of one shape: each other one is compiled again
        results = [
            train_window(trainee, [batch([1, 2])], samples=2, rate=0.01, rules=case.rules(), seed=1)
            for trainee in trainees
        ]
        assert results[0] == results[1]
    same(outcome(trainees[1]), outcome(trainees[0]))
    assert acting.carrier.counters.sent_bytes > 0
    acting.remove()
    assert [block._compiled_call_impl for block in blocks] == compiled
