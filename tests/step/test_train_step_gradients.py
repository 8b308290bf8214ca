"""The gradient of a window is the exact mean over its samples, whatever buckets and micro-batches they came in."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from supertuner.data.ordering.micro_batches import micro_batches, shard_window
from supertuner.models.spec import ModelSource
from supertuner.optim.schedule import BatchRamp, windows
from supertuner.step.batch import StepBatch
from supertuner.step.train_step import ExpertState, StepOptions, WindowResult, sample_losses, train_window
from tests.step.step_builders import (
    GradientEditingReduction,
    GradientRecordingReduction,
    build_batch,
    build_order,
    build_wan_batch,
    concatenate_batches,
    cut_window,
    grouped_by_shape,
    tiny_expert_state,
    tiny_step_options,
    wan_lora_state,
    wan_step_options,
)


def large_batch_gradient(state: ExpertState, batches: Sequence[StepBatch], options: StepOptions) -> list[torch.Tensor]:
    """The gradient of the mean of all samples' losses, computed by one plain backward pass."""
    losses = torch.cat([sample_losses(state, batch, options) for batch in grouped_by_shape(batches)])
    return list(torch.autograd.grad(losses.mean(), list(state.parameters.values())))


def train_recorded(
    state: ExpertState, batches: Sequence[StepBatch], options: StepOptions, recorder: GradientRecordingReduction
) -> WindowResult:
    samples = sum(map(len, batches))
    return train_window(
        state, batches, samples=samples, learning_rate=1e-3, options=replace(options, reduction=recorder)
    )


def assert_close(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor], tolerance: float = 1e-6) -> None:
    assert len(left) == len(right) > 0
    for one, other in zip(left, right, strict=True):
        assert (one - other).abs().max() <= tolerance * max(1.0, float(other.abs().max()))


@st.composite
def ramps(draw: st.DrawFn) -> BatchRamp:
    start = draw(st.integers(1, 6))
    return BatchRamp(start, start + draw(st.integers(0, 9)), draw(st.integers(0, 40)))


@settings(max_examples=40, deadline=None)
@given(
    ramp=ramps(),
    total=st.integers(1, 90),
    sizes=st.lists(st.integers(1, 25), min_size=1, max_size=4),
    micro=st.integers(1, 8),
)
def test_each_window_of_a_ramp_has_the_gradient_of_one_large_batch(
    ramp: BatchRamp, total: int, sizes: list[int], micro: int
) -> None:
    state, options, order = tiny_expert_state(), tiny_step_options(), build_order(sizes, micro)
    seen = 0
    for window in windows(total, ramp):
        batches = cut_window(order, window, micro)
        assert max(map(len, batches)) <= micro
        expected = large_batch_gradient(state, batches, options)
        recorder = GradientRecordingReduction()
        result = train_recorded(state, batches, options, recorder)
        assert_close(recorder.gradients, expected)
        assert recorder.calls == 1
        assert len(result.losses) == len(window)
        seen += len(window)
    assert seen == total


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 1000))
def test_loss_and_gradient_do_not_depend_on_the_split_into_micro_batches(pieces: list[int], begin: int) -> None:
    edges = [begin + sum(pieces[:n]) for n in range(len(pieces) + 1)]
    batches = [build_batch(range(left, right), 3) for left, right in pairwise(edges)]
    in_pieces, at_once = GradientRecordingReduction(), GradientRecordingReduction()
    some = train_recorded(tiny_expert_state(), batches, tiny_step_options(), in_pieces)
    one = train_recorded(tiny_expert_state(), [concatenate_batches(batches)], tiny_step_options(), at_once)
    assert some.loss == pytest.approx(one.loss, rel=1e-6)
    assert some.grad_norm == pytest.approx(one.grad_norm, rel=1e-6)
    assert some.positions == one.positions
    assert_close(in_pieces.gradients, at_once.gradients)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_gradients_of_all_processes_sum_to_that_of_one_process(ranks: int) -> None:
    order, window = build_order([9, 4], 2), range(0, 7)
    expected = large_batch_gradient(tiny_expert_state(), cut_window(order, window, 2), tiny_step_options())
    added = [torch.zeros_like(one) for one in expected]
    for rank in range(ranks):
        mine = shard_window(window, rank, ranks)
        batches = [
            build_batch([int(p) for p in piece.draws.position], piece.bucket.shape[1])
            for piece in micro_batches(order, mine, 2)
        ]
        recorder = GradientRecordingReduction()
        train_window(
            tiny_expert_state(),
            batches,
            samples=len(window),
            learning_rate=1e-3,
            options=replace(tiny_step_options(), reduction=recorder),
        )
        for total, gradient in zip(added, recorder.gradients, strict=True):
            total += gradient
    assert_close(added, expected)


def test_a_process_without_samples_takes_part_in_the_window() -> None:
    other = GradientRecordingReduction()
    first, second = tiny_expert_state(), tiny_expert_state()
    train_window(
        first,
        [build_batch([1], 3)],
        samples=1,
        learning_rate=1e-3,
        options=replace(tiny_step_options(), reduction=other),
    )

    def add_gradients_of_the_other_process(parameters: object) -> None:
        for parameter, gradient in zip(second.parameters.values(), other.gradients, strict=True):
            assert parameter.grad is None
            parameter.grad = gradient.clone()

    result = train_window(
        second,
        [],
        samples=1,
        learning_rate=1e-3,
        options=replace(tiny_step_options(), reduction=GradientEditingReduction(add_gradients_of_the_other_process)),
    )
    assert result.finite and result.grad_norm > 0
    assert all(torch.equal(first.parameters[name], second.parameters[name]) for name in first.parameters)


def test_a_window_that_receives_too_many_samples_raises_an_assertion() -> None:
    with pytest.raises(AssertionError, match="window of 2 samples received 3"):
        train_window(
            tiny_expert_state(), [build_batch([1, 2, 3], 3)], samples=2, learning_rate=1e-3, options=tiny_step_options()
        )


def test_a_ramp_over_wan_with_a_lora_has_the_gradients_of_large_batches(tiny_wan: ModelSource) -> None:
    state, options = wan_lora_state(tiny_wan, "fp32"), wan_step_options(tiny_wan, "fp32")
    sizes = []
    for window in windows(23, BatchRamp(2, 6, 12)):
        still, moving = ([p for p in window if p % 3 == which or (p + 1) % 3 == which] for which in (0, 1))
        still = [p for p in still if p not in moving]
        batches = [build_wan_batch(still[n : n + 2], 4) for n in range(0, len(still), 2)]
        batches += [build_wan_batch([p], 6, frames=2) for p in moving]
        expected = large_batch_gradient(state, batches, options)
        recorder = GradientRecordingReduction()
        result = train_recorded(state, batches, options, recorder)
        assert_close(recorder.gradients, expected)
        assert result.finite and result.grad_norm > 0
        sizes.append(len(result.losses))
    assert sizes == [2, 2, 3, 4, 5, 6, 1]


def test_gradient_checkpointing_changes_no_gradient(tiny_wan: ModelSource) -> None:
    recorder, again = GradientRecordingReduction(), GradientRecordingReduction()
    batches = [build_wan_batch([1, 2], 4), build_wan_batch([3], 6)]
    train_recorded(wan_lora_state(tiny_wan, "fp32"), batches, wan_step_options(tiny_wan, "fp32"), recorder)
    state = wan_lora_state(tiny_wan, "fp32", checkpointing=True)
    assert state.module.is_gradient_checkpointing  # type: ignore[truthy-function]
    train_recorded(state, batches, wan_step_options(tiny_wan, "fp32"), again)
    assert_close(recorder.gradients, again.gradients)


def test_bf16_is_near_fp32_and_trains_fp32_weights(tiny_wan: ModelSource) -> None:
    exact, rough = GradientRecordingReduction(), GradientRecordingReduction()
    batches = [build_wan_batch([1, 2], 4), build_wan_batch([3], 6)]
    train_recorded(wan_lora_state(tiny_wan, "fp32"), batches, wan_step_options(tiny_wan, "fp32"), exact)
    state = wan_lora_state(tiny_wan, "bf16")
    before = copy.deepcopy(dict(state.parameters))
    rough_batches = [build_wan_batch([1, 2], 4, dtype=torch.bfloat16), build_wan_batch([3], 6, dtype=torch.bfloat16)]
    result = train_recorded(state, rough_batches, wan_step_options(tiny_wan, "bf16"), rough)
    left, right = (torch.cat([g.flatten() for g in recorder.gradients]) for recorder in (exact, rough))
    assert torch.nn.functional.cosine_similarity(left, right, dim=0) > 0.99
    assert result.finite
    assert {p.dtype for p in state.parameters.values()} == {torch.float32}
    assert state.module.get_submodule("blocks.0.attn1.to_q.base_layer").weight.dtype == torch.bfloat16
    assert all(not torch.equal(p, before[name]) for name, p in state.parameters.items())
