"""Plans of tiny models on a device that is not the host: nothing meets what is in another memory, and what is at home
takes no memory of the device. (On the CPU, where both are the same, neither would be noticed.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from supertuner.core.events import NullSink
from supertuner.models.adapters.attach import TrainableExpert, temporary_weights
from supertuner.models.objective.diffusion import TrainingObjective
from supertuner.models.spec import Tensors
from supertuner.optim import optimizer_state
from supertuner.plan.placement.plan import ActivationPolicy, OptimizerPlacement, WeightPlacement
from supertuner.plan.placement.replan import PlanAssumptions
from supertuner.plan.placement.run_plans import ExpertPlan
from supertuner.step.expert_swap import ExpertSwap
from supertuner.step.parameter_state import HOST, ParameterState
from supertuner.step.precision import ComputePrecision
from supertuner.step.train_step import (
    ExpertState,
    StepOptions,
    WindowResult,
    evaluation_weights,
    held_out_losses,
    train_window,
)
from supertuner.train.offload.apply import OffloadedExpert, apply_plan
from supertuner.train.offload.manager import OffloadManager
from supertuner.train.offload.swappable_expert import PlannedSwappableExpert
from supertuner.train.offload.transfer import CudaStreamTransfer
from tests.train.offload.making import OffloadCase, a_plan, batch, restore_to_device

GPU = torch.device("cuda", 0)


def denoise(module: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, text: Tensors, _: Tensors) -> torch.Tensor:
    found: torch.Tensor = module(noisy, levels * 1000, text["embeds"], return_dict=False)[0]
    return found


def rules(case: OffloadCase) -> StepOptions:
    return StepOptions(denoise, TrainingObjective(), ComputePrecision(case.precision, GPU), max_grad_norm=0.5)


def begun(case: OffloadCase, *, at_home: bool = False, **plan: Any) -> tuple[ExpertState, OffloadedExpert]:
    """An expert under a plan: loaded to the device, or `at_home`, where a run loads what is streamed."""
    trainee = case.expert_state()
    if not at_home:
        trainee.module.to(GPU)
        ParameterState(trainee.optimizer, trainee.ema).move_to(GPU)
    acting = apply_plan(trainee, a_plan(trainee.module, **plan), CudaStreamTransfer(GPU), min_offload_bytes=1)
    return trainee, acting


def window(trainee: ExpertState, case: OffloadCase, number: int = 0) -> WindowResult:
    given = (batch([number, number + 1]).to(GPU), batch([number + 2], side=6).to(GPU))
    return train_window(trainee, given, samples=3, learning_rate=0.01, options=rules(case), seed=number)


def devices(tensors: Any) -> set[str]:
    return {tensor.device.type for tensor in tensors}


def remembered(trainee: ExpertState) -> list[torch.Tensor]:
    """What an optimizer remembers of weights, and averages."""
    states = [one for state in trainee.optimizer.torch_optimizer.state.values() for one in state.values()]
    averages = [] if trainee.ema is None else list(trainee.ema.averages.values())
    return [one for one in (*states, *averages) if isinstance(one, torch.Tensor) and one.numel() > 1]


@pytest.mark.parametrize("stepping", [OptimizerPlacement.STREAMED, OptimizerPlacement.HOST])
@pytest.mark.parametrize("optimizer", ["schedule_free", "automagic"])
def test_what_is_read_of_state_at_home_is_read_beside_weights_on_the_device(
    optimizer: str, stepping: OptimizerPlacement
) -> None:
    case = OffloadCase(optimizer=optimizer, ema=False)
    trainee, _ = begun(case, stepping=stepping)
    for number in range(2):
        window(trainee, case, number)
    averages = evaluation_weights(trainee)
    assert (averages is not None) == (optimizer == "schedule_free")
    trainee.optimizer.learning_rate_spread()
    tensors, facts = optimizer_state.pack_state(trainee.optimizer)
    again, acting = begun(case, stepping=stepping)
    acting.detach()
    acts = OffloadManager(
        [again], {"model": ExpertPlan(acting.plan, PlanAssumptions(), 1)}, acting.transfer, NullSink()
    )
    optimizer_state.restore_state(again.optimizer, tensors, facts, acts.optimizer_state_device("model"))
    assert devices(remembered(again)) == {"cpu"}, "a checkpoint is not read to the device"
    window(again, case, 2)


@pytest.mark.parametrize("stepping", OptimizerPlacement)
def test_a_weight_without_a_gradient_has_its_average_beside_it(stepping: OptimizerPlacement) -> None:
    """As the last block's text branch in some models."""
    case = OffloadCase()
    trainee, _ = begun(case, stepping=stepping)
    name, unused = next(iter(trainee.parameters.items()))
    unused.requires_grad_(False)
    for number in range(2):
        window(trainee, case, number)
    assert trainee.optimizer.torch_optimizer.state.get(unused) is None
    assert devices(trainee.parameters.values()) == {"cuda"}
    assert trainee.ema is not None and trainee.ema.averages[name].device.type == (
        "cuda" if stepping is OptimizerPlacement.GPU else "cpu"
    )


@pytest.mark.parametrize("stepping", [OptimizerPlacement.STREAMED, OptimizerPlacement.HOST])
def test_what_is_remembered_is_at_home_from_the_beginning(stepping: OptimizerPlacement) -> None:
    """Not only after the first window: activations of that one need the room too."""
    trainee, _ = begun(OffloadCase(kind="full"), stepping=stepping)
    assert devices(trainee.parameters.values()) == {"cuda"}
    assert devices(remembered(trainee)) == {"cpu"}


def test_an_expert_that_waits_is_at_home_also_after_an_average_was_lent_to_it() -> None:
    """Whoever lends puts back what was there before, on the device, while the expert went home meanwhile."""
    case, turns = OffloadCase(), ExpertSwap()
    pair = {name: begun(case, idle_at_home=True) for name in ("high_noise", "low_noise")}
    for name, (_, acting) in pair.items():
        turns.add(name, PlannedSwappableExpert(acting))
    (first, _), (second, _) = pair.values()
    window(first, case)
    assert first.ema is not None
    with temporary_weights(TrainableExpert("x", "lora", first.module, first.parameters), dict(first.ema.averages)):
        for one in (first, second):
            held_out_losses(one, [batch([9]).to(GPU)], rules(case))
    for number in range(2):
        window(second, case, number)
        assert devices(first.module.parameters()) == {"cpu"}
    window(first, case, 3)
    assert devices(second.module.parameters()) == {"cpu"}


class Block(nn.Module):
    """Called by keywords alone, as Flux and Qwen-Image call theirs; it notes what its dropout draws from."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.drawn: list[bytes] = []

    def forward(self, *, hidden_states: torch.Tensor, others: dict[str, torch.Tensor]) -> torch.Tensor:
        self.drawn.append(torch.cuda.get_rng_state(GPU).numpy().tobytes())
        made: torch.Tensor = nn.functional.dropout(self.layer(hidden_states), 0.5)
        return made + others["more"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, noisy: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            noisy = block(hidden_states=noisy, others={"more": noisy})
        return noisy


def test_a_recomputed_block_draws_what_it_drew_however_it_is_called() -> None:
    """Else dropout would leave out other numbers in the backward pass than in the forward pass: wrong gradients."""
    case = OffloadCase(ema=False)
    trainee = case.expert_state()
    model = Model().to(GPU)
    trainee.module, trainee.parameters = model, {}
    apply_plan(trainee, a_plan(model, activations=ActivationPolicy.RECOMPUTE), CudaStreamTransfer(GPU))
    model(torch.ones(2, 4, device=GPU)).sum().backward()
    for block in model.blocks:
        first, again = block.drawn  # type: ignore[misc]
        assert first == again
    assert model.blocks[0].drawn[0] != model.blocks[1].drawn[0]  # type: ignore[index]


@pytest.mark.parametrize(
    "case", [OffloadCase(kind="full", precision="bf16"), OffloadCase(base="int8", precision="bf16")], ids=str
)
@pytest.mark.parametrize("fate", ActivationPolicy)
def test_everything_at_home_runs_and_is_at_home_again(case: OffloadCase, fate: ActivationPolicy) -> None:
    trainee, acting = begun(
        case, at_home=True, weights=WeightPlacement.STREAMED, activations=fate, stepping=OptimizerPlacement.STREAMED
    )
    for number in range(2):
        window(trainee, case, number)
    held_out_losses(trainee, [batch([9]).to(GPU)], rules(case))
    assert devices(remembered(trainee)) == {"cpu"}
    leaves = [leaf.get() for block in acting.ring.streamed.values() for leaf in block.stored]
    assert devices(leaves) == {HOST.type}
    restore_to_device(acting)
    assert devices(remembered(trainee)) == devices(leaf.get() for leaf in _leaves(acting)) == {"cuda"}
    window(trainee, case, 5)


def _leaves(acting: OffloadedExpert) -> list[Any]:
    return [leaf for block in acting.ring.streamed.values() for leaf in block.stored]
