"""Sharded weights train as those of one process: losses, gradients, weights and averages."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FSDPModule

from supertuner.config.settings.parallel import ParallelSettings
from supertuner.core.errors import TrainError
from supertuner.distributed.fsdp import FsdpSwappableExpert, rows_per_rank
from supertuner.distributed.same_start import require_same_unsharded_weights
from supertuner.distributed.torch_process_group import TorchProcessGroup
from supertuner.models.adapters.attach import load_trainable_state, temporary_weights, trainable_state
from supertuner.models.spec import ModelSource
from supertuner.step.expert_swap import ExpertSwap
from supertuner.step.train_step import held_out_losses
from tests.distributed.ranks import run_launched, run_ranks
from tests.distributed.sharing import (
    Array,
    ShardingCase,
    ShardingResult,
    a_trained,
    a_trainee,
    by_one_process,
    opened,
    shared_out,
    together,
    window,
)
from tests.models.families.pipelines import tiny_wan
from tests.step.step_builders import CPU, build_wan_batch, wan_step_options

__all__ = ["tiny_wan"]

CASES = {
    "lora": ShardingCase("lora"),
    "lokr": ShardingCase("lokr"),
    "all weights": ShardingCase("full"),
    "all weights, recomputed": ShardingCase("full", checkpointing=True),
    "all weights, held until the backward pass": ShardingCase(
        "full", settings=ParallelSettings(reshard_after_forward=False)
    ),
    "all weights, added up after each batch": ShardingCase("full", settings=ParallelSettings(reduce_every_batch=True)),
    "all weights in host memory": ShardingCase("full", settings=ParallelSettings(cpu_offload=True)),
    "lora, recomputed, base in host memory": ShardingCase("lora", "fp32", True, ParallelSettings(cpu_offload=True)),
    "lora in bf16": ShardingCase("lora", "bf16"),
    "all weights in bf16": ShardingCase("full", "bf16"),
}


def farthest(left: Mapping[str, Array], right: Mapping[str, Array]) -> float:
    assert left.keys() == right.keys() and left
    return max(float(np.abs(left[name] - right[name]).max()) for name in left)


@pytest.fixture(scope="module")
def alone(tiny_wan: ModelSource) -> dict[str, ShardingResult]:
    (found,) = run_launched(1, by_one_process, tiny_wan, list(CASES.values()))
    return dict(zip(CASES, found, strict=True))


@pytest.fixture(scope="module")
def by_two(tiny_wan: ModelSource) -> dict[str, ShardingResult]:
    ranks = run_ranks(2, shared_out, tiny_wan, list(CASES.values()))
    return {name: together([found[place] for found in ranks]) for place, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_with_sharded_weights_train_as_one_process(
    name: str, alone: dict[str, ShardingResult], by_two: dict[str, ShardingResult]
) -> None:
    one, two = alone[name], by_two[name]
    exact = CASES[name].precision == "fp32"
    assert two.losses == pytest.approx(one.losses, rel=1e-6 if exact else 1e-3)
    assert two.norms == pytest.approx(one.norms, rel=1e-6 if exact else 1e-2)
    part_of_a_step = 0.01 if exact else 1.0  # three steps move most weights by three learning rates
    assert farthest(two.weights, one.weights) <= part_of_a_step * CASES[name].rate
    assert farthest(two.averages, one.averages) <= part_of_a_step * CASES[name].rate


def test_unequal_and_empty_shards_train_as_one_process(tiny_wan: ModelSource, alone: dict[str, ShardingResult]) -> None:
    case = CASES["all weights"]
    ranks = run_ranks(3, shared_out, tiny_wan, [case])
    sizes = {name: [len(found[0].weights[name]) for found in ranks] for name in ranks[0][0].weights}
    assert [1, 0, 0] in sizes.values() and any(min(rows) < max(rows) and min(rows) > 0 for rows in sizes.values())
    three = together([found[0] for found in ranks])
    assert three.losses == pytest.approx(alone["all weights"].losses, rel=1e-6)
    assert farthest(three.weights, alone["all weights"].weights) <= 0.01 * case.rate


def _lent(group: TorchProcessGroup, source: ModelSource, held: bool) -> tuple[bool, bool, float]:
    """Returns whether a temporary average is used, whether the weights return to the bit, in the shards and in what is
    computed from them, and the error of gathered tensors."""
    case = ShardingCase("full", settings=ParallelSettings(reshard_after_forward=not held))
    _, sharing = opened(group, case)
    assert sharing is not None
    whole = a_trained(source, case)
    before = trainable_state(whole)
    trained = sharing.shard_expert(whole)
    expert_state, options, batch = a_trainee(trained), wan_step_options(source, "fp32"), [build_wan_batch([1, 2], 4)]
    first = held_out_losses(expert_state, batch, options)
    others = {name: 0.5 * parameter.detach() for name, parameter in trained.parameters.items()}
    kept = trainable_state(trained)
    with temporary_weights(trained, others):
        lent = held_out_losses(expert_state, batch, options)
    again = held_out_losses(expert_state, batch, options)
    assert trained.shards is not None
    found = {name: trained.shards.gather_full(name, part) for name, part in trained.parameters.items()}
    wrong = max(float((found[name] - one).abs().max()) for name, one in before.items()) if group.rank == 0 else 0.0
    assert group.rank == 0 or not any(one is not None for one in found.values()), "only the first has them"
    returned = all(torch.equal(one, kept[name]) for name, one in trainable_state(trained).items())
    return not torch.equal(lent, first), returned and torch.equal(again, first), wrong


@pytest.mark.parametrize("held", [False, True])
def test_shards_compute_with_an_average_and_get_their_weights_back_to_the_bit(
    tiny_wan: ModelSource, held: bool
) -> None:
    assert run_ranks(3, _lent, tiny_wan, held) == [(True, True, 0.0)] * 3


def _alike(group: TorchProcessGroup, source: ModelSource, seeds: list[int]) -> str:
    try:
        require_same_unsharded_weights(group, a_trained(source, ShardingCase("full"), seeds[group.rank]))
    except TrainError as error:
        return str(error)
    return "alike"


def test_weights_are_compared_before_they_are_sharded(tiny_wan: ModelSource) -> None:
    """After sharding, rows of two different models would silently form a third one."""
    assert run_ranks(2, _alike, tiny_wan, [1, 1]) == ["alike"] * 2
    for message in run_ranks(2, _alike, tiny_wan, [1, 2]):
        assert message.startswith("rank 1 starts differently from rank 0: weights of low_noise (")


def _looked_between(group: TorchProcessGroup, source: ModelSource, kind: str) -> list[tuple[bool, bool]]:
    """Evaluate, then change the weights by a window, a restored state, or a move: returns whether the next evaluation
    sees other weights, and whether it sees all of them. An evaluation gathers the parameters outside of blocks, and no
    backward pass releases them."""
    case = ShardingCase(kind)
    parallel, sharing = opened(group, case)
    assert sharing is not None
    trained = sharing.shard_expert(a_trained(source, case))
    expert_state, options, batch = a_trainee(trained), wan_step_options(source, "fp32"), [build_wan_batch([1, 2], 4)]
    half = {name: 0.5 * parameter.detach() for name, parameter in trained.parameters.items()}

    def moved() -> None:
        _to_new_memory(trained.module, CPU)
        sharing.relink_parameters(trained.parameters.values())

    changes = [
        lambda: window(parallel, source, expert_state, range(4), case),
        lambda: load_trainable_state(trained, half),
        moved,
        lambda: window(parallel, source, expert_state, range(4, 8), case),
    ]
    found = []
    for change in changes:
        before = held_out_losses(expert_state, batch, options)
        change()
        after = held_out_losses(expert_state, batch, options)
        for module in trained.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        found.append((torch.equal(before, after), torch.equal(after, held_out_losses(expert_state, batch, options))))
    return found


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_weights_gathered_for_validation_are_not_used_after_they_changed(tiny_wan: ModelSource, kind: str) -> None:
    changed, same = (False, True), (True, True)
    assert run_ranks(2, _looked_between, tiny_wan, kind) == [[changed, changed, same, changed]] * 2


def _in_turn(group: TorchProcessGroup, source: ModelSource, kind: str, moving: bool) -> tuple[int, list[float], bool]:
    """Train two experts alternately; returns the number of swaps, the losses, and whether FSDP gathers from the trained
    memory. `moving`: a move gives all tensors of a module new memory, as a move to another device would."""
    case = ShardingCase(kind)
    parallel, sharing = opened(group, case)
    assert sharing is not None
    trained = [sharing.shard_expert(a_trained(source, case, seed)) for seed in (1, 2)]
    expert_states = [a_trainee(one) for one in trained]
    sharing.enable_expert_swap(expert_states)
    assert sharing.expert_swap is None, "a CPU has no other memory to wait in"
    turns = ExpertSwap()
    if moving:
        for number, expert_state in enumerate(expert_states):
            turns.add(str(number), FsdpSwappableExpert(expert_state, sharing, _to_new_memory))
    steps = [(expert_states[place], range(4 * step, 4 * step + 4)) for step, place in enumerate((0, 0, 1, 0))]
    losses = [window(parallel, source, expert_state, span, case).loss for expert_state, span in steps]
    known = [(part, weight.to_local()) for part, weight in sharing.dtensor_by_parameter.items() if part.numel()]
    assert bool(known) == (kind == "full")
    return turns.swap_count, losses, all(part.data_ptr() == weight.data_ptr() for part, weight in known)


def _to_new_memory(module: nn.Module, device: torch.device) -> None:
    module._apply(lambda tensor: tensor.to(device, copy=True))


def _stayed_and_moved(group: TorchProcessGroup, source: ModelSource) -> list[tuple[int, list[float], bool]]:
    return [_in_turn(group, source, kind, moving) for kind in ("lora", "full") for moving in (False, True)]


def test_swapped_experts_train_as_resident_ones(tiny_wan: ModelSource) -> None:
    for found in run_ranks(2, _stayed_and_moved, tiny_wan):
        for stayed, moved in batched(found):
            assert (stayed[0], moved[0]) == (0, 3)
            assert stayed[1:] == moved[1:] and moved[2], "to the bit, and what is trained is where FSDP gathers from"


def batched(found: list[tuple[int, list[float], bool]]) -> list[tuple[tuple[int, list[float], bool], ...]]:
    return [tuple(found[n : n + 2]) for n in range(0, len(found), 2)]


@given(st.integers(1, 200), st.integers(1, 17))
def test_rows_per_rank_are_those_of_torch_chunk(rows: int, ranks: int) -> None:
    cut = [len(part) for part in torch.empty(rows).chunk(ranks)]
    assert rows_per_rank(rows, ranks) == cut + [0] * (ranks - len(cut))
