"""What a window changes and what it does not: clipping, averages, windows that are not finite, dropout, fp16."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from supertuner.core.errors import TrainError
from supertuner.models.spec import ModelSource
from supertuner.optim.optimizer_state import pack_state
from supertuner.optim.schedule import learning_rate_factor
from supertuner.step.train_step import (
    ExpertState,
    evaluation_weights,
    held_out_losses,
    prepare_for_training,
    train_window,
)
from tests.optim.optimizer_builders import same_bits
from tests.step.step_builders import (
    GradientEditingReduction,
    GradientRecordingReduction,
    TinyDenoiser,
    build_batch,
    build_expert_state,
    build_wan_batch,
    replace_with_fake_tensors,
    tiny_expert_state,
    tiny_step_options,
    wan_lora_state,
    wan_step_options,
)


def snapshot_state(state: ExpertState) -> dict[str, torch.Tensor]:
    """Copies of everything that a window may change."""
    snapshot = {f"weight {name}": p.detach().clone() for name, p in state.parameters.items()}
    tensors, meta = pack_state(state.optimizer)
    snapshot |= {f"optimizer {name}": tensor for name, tensor in tensors.items()}
    if state.ema is not None:
        averages, updates = state.ema.state()
        snapshot |= {f"average {name}": tensor for name, tensor in averages.items()}
        snapshot["updates"] = torch.tensor(updates)
    snapshot["meta"] = torch.tensor(list(repr(meta).encode()), dtype=torch.uint8)
    return snapshot


def train_steps(state: ExpertState, count: int, begin: int = 0) -> None:
    for step in range(begin, begin + count):
        batches = [build_batch([2 * step], 3), build_batch([2 * step + 1], 4)]
        rate = state.optimizer.base_learning_rate * learning_rate_factor(step, 20, "cosine", 3)
        assert train_window(state, batches, samples=2, learning_rate=rate, options=tiny_step_options()).finite


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "adafactor", "prodigy", "schedule_free", "lion"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_window_that_is_not_finite_changes_nothing_and_names_its_samples(optimizer: str, value: float) -> None:
    state = tiny_expert_state(optimizer=optimizer, ema=0.9)
    train_steps(state, 3)
    before = snapshot_state(state)
    bad = build_batch([8, 9], 3)
    bad.latents[1, 0, 0, 0] = value
    result = train_window(state, [build_batch([7], 4), bad], samples=3, learning_rate=1e-3, options=tiny_step_options())
    assert not result.finite and not result.overflowed
    assert result.suspect_positions == (9,)
    assert same_bits(before, snapshot_state(state))
    assert all(p.grad is None for p in state.parameters.values())
    other = tiny_expert_state(optimizer=optimizer, ema=0.9)
    train_steps(other, 3)
    train_steps(state, 2, begin=3)
    train_steps(other, 2, begin=3)
    assert same_bits(snapshot_state(state), snapshot_state(other))


def test_a_gradient_that_is_not_finite_makes_every_sample_a_suspect() -> None:
    state = tiny_expert_state()

    def spoil(parameters: object) -> None:
        state.parameters["outer.bias"].grad = torch.full((4,), math.inf)

    before = snapshot_state(state)
    result = train_window(
        state,
        [build_batch([1, 2], 3)],
        samples=2,
        learning_rate=1e-3,
        options=replace(tiny_step_options(), reduction=GradientEditingReduction(spoil)),
    )
    assert math.isfinite(result.loss) and not result.finite
    assert result.suspect_positions == (1, 2)
    assert same_bits(before, snapshot_state(state))


def test_gradients_above_the_limit_are_scaled_to_it_by_one_factor() -> None:
    free, limited, recorder = tiny_expert_state(), tiny_expert_state(), GradientRecordingReduction()
    batches = [build_batch([1, 2, 3], 3)]
    result = train_window(
        free, batches, samples=3, learning_rate=1e-3, options=replace(tiny_step_options(), reduction=recorder)
    )
    limit = result.grad_norm / 3
    clipped = train_window(
        limited, batches, samples=3, learning_rate=1e-3, options=tiny_step_options(max_grad_norm=limit)
    )
    assert clipped.grad_norm == result.grad_norm  # the result reports the norm before clipping
    first_moments = [limited.optimizer.torch_optimizer.state[p]["exp_avg"] for p in limited.parameters.values()]
    for moment, gradient in zip(first_moments, recorder.gradients, strict=True):
        assert torch.allclose(moment, 0.1 * gradient / 3, rtol=1e-4, atol=1e-9)


def test_a_limit_by_value_clips_each_element_of_the_gradients_alone() -> None:
    free, limited, recorder = tiny_expert_state(), tiny_expert_state(), GradientRecordingReduction()
    batches, options = [build_batch([1, 2, 3], 3)], tiny_step_options()
    train_window(free, batches, samples=3, learning_rate=1e-3, options=replace(options, reduction=recorder))
    limit = float(torch.cat([gradient.flatten() for gradient in recorder.gradients]).abs().median())
    train_window(limited, batches, samples=3, learning_rate=1e-3, options=replace(options, max_grad_value=limit))
    first_moments = [limited.optimizer.torch_optimizer.state[p]["exp_avg"] for p in limited.parameters.values()]
    for moment, gradient in zip(first_moments, recorder.gradients, strict=True):
        assert torch.allclose(moment, 0.1 * gradient.clamp(-limit, limit), rtol=1e-5, atol=1e-9)


def test_a_limit_above_the_norm_changes_no_bit() -> None:
    free, limited = tiny_expert_state(), tiny_expert_state()
    for state, limit in ((free, None), (limited, 1e6)):
        train_window(
            state,
            [build_batch([1, 2], 3)],
            samples=2,
            learning_rate=1e-3,
            options=tiny_step_options(max_grad_norm=limit),
        )
    assert same_bits(snapshot_state(free), snapshot_state(limited))


def test_the_reported_norm_is_the_norm_of_all_gradients_together() -> None:
    recorder = GradientRecordingReduction()
    result = train_window(
        tiny_expert_state(),
        [build_batch([1], 3)],
        samples=1,
        learning_rate=1e-3,
        options=replace(tiny_step_options(), reduction=recorder),
    )
    assert result.grad_norm == pytest.approx(
        float(torch.cat([g.flatten() for g in recorder.gradients]).norm()), rel=1e-6
    )


def test_a_window_updates_the_average_after_the_weights() -> None:
    state = tiny_expert_state(ema=0.9)
    start = {name: p.detach().clone() for name, p in state.parameters.items()}
    train_steps(state, 1)
    assert state.ema is not None and state.ema.updates == 1
    for name, parameter in state.parameters.items():
        expected = 0.1 * start[name] + 0.9 * parameter.detach()
        assert torch.allclose(state.ema.averages[name], expected, atol=1e-7)


def test_evaluation_uses_the_moving_average_or_the_schedule_free_average_or_the_weights() -> None:
    averaged, free, plain = (
        tiny_expert_state(ema=0.9),
        tiny_expert_state(optimizer="schedule_free"),
        tiny_expert_state(),
    )
    for state in (averaged, free, plain):
        train_steps(state, 2)
    assert averaged.ema is not None
    assert same_bits(evaluation_weights(averaged) or {}, averaged.ema.averages)
    assert same_bits(evaluation_weights(free) or {}, free.optimizer.averaged_weights() or {})
    assert evaluation_weights(plain) is None


def test_the_window_uses_the_learning_rate_of_its_argument() -> None:
    slow, fast = tiny_expert_state(), tiny_expert_state()
    start = {name: p.detach().clone() for name, p in slow.parameters.items()}
    for state, rate in ((slow, 1e-4), (fast, 1e-3)):
        train_window(state, [build_batch([1], 3)], samples=1, learning_rate=rate, options=tiny_step_options())
    moved = [
        float((state.parameters["inner.bias"].detach() - start["inner.bias"]).abs().mean()) for state in (slow, fast)
    ]
    assert moved[1] == pytest.approx(10 * moved[0], rel=0.05)


def test_different_micro_batch_sizes_give_nearly_equal_weights_after_many_steps() -> None:
    small, large = tiny_expert_state(), tiny_expert_state()
    for step in range(20):
        positions = range(6 * step, 6 * step + 6)
        pieces = [build_batch(positions[n : n + 2], 3) for n in (0, 2, 4)]
        train_window(small, pieces, samples=6, learning_rate=1e-3, options=tiny_step_options())
        train_window(large, [build_batch(positions, 3)], samples=6, learning_rate=1e-3, options=tiny_step_options())
    for name, parameter in small.parameters.items():
        assert torch.allclose(parameter, large.parameters[name], atol=1e-5)


def test_held_out_loss_equals_the_forward_pass_and_changes_no_state() -> None:
    state = tiny_expert_state()
    state.module.append_dropout = nn.Dropout(0.5)  # type: ignore[assignment]
    state.module.train()
    state.module.inner.eval()  # type: ignore[union-attr]
    before = snapshot_state(state)
    losses = held_out_losses(state, [build_batch([1, 2], 3), build_batch([3], 4)], tiny_step_options())
    again = held_out_losses(state, [build_batch([1], 3), build_batch([2], 3), build_batch([3], 4)], tiny_step_options())
    assert losses.shape == (3,) and not losses.requires_grad
    assert torch.allclose(losses, again, rtol=1e-6)
    assert same_bits(before, snapshot_state(state))
    assert [part.training for part in state.module.modules()] == [True, False, True, True, True]
    assert held_out_losses(state, [], tiny_step_options()).shape == (0,)


def test_validating_between_windows_changes_no_bit_of_the_training(tiny_wan: ModelSource) -> None:
    undisturbed, validated = (wan_lora_state(tiny_wan, "bf16", dropout=0.3) for _ in range(2))
    options = wan_step_options(tiny_wan, "bf16", max_grad_norm=0.5)
    for step in range(3):
        batches = [build_wan_batch([step], 4, dtype=torch.bfloat16)]
        for state in (undisturbed, validated):
            train_window(state, batches, samples=1, learning_rate=1e-3, options=options, seed=step)
        held_out_losses(validated, [build_wan_batch([50, 51], 6, dtype=torch.bfloat16)], options)
        torch.rand(step + 1)
    assert same_bits(snapshot_state(undisturbed), snapshot_state(validated))


def test_dropout_depends_only_on_the_windows_seed_and_leaves_the_global_generator_alone(tiny_wan: ModelSource) -> None:
    def window(seed: int | None) -> GradientRecordingReduction:
        recorder = GradientRecordingReduction()
        state = wan_lora_state(tiny_wan, "fp32", dropout=0.5)
        options = wan_step_options(tiny_wan, "fp32")
        train_window(
            state,
            [build_wan_batch([1], 4)],
            samples=1,
            learning_rate=1e-3,
            options=replace(options, reduction=recorder),
            seed=seed,
        )
        return recorder

    rng_state = torch.get_rng_state()
    first, same, other = window(5), window(5), window(6)
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert all(torch.equal(*pair) for pair in zip(first.gradients, same.gradients, strict=True))
    assert not all(torch.equal(*pair) for pair in zip(first.gradients, other.gradients, strict=True))


def test_fp16_with_a_loss_scaler_has_nearly_the_gradient_of_fp32() -> None:
    exact, half = tiny_expert_state(), tiny_expert_state("fp16")
    assert half.loss_scaler is not None and exact.loss_scaler is None
    half.loss_scaler.scale = 1024.0
    batches = [build_batch([1, 2], 3), build_batch([3], 4)]
    expected = train_window(exact, batches, samples=3, learning_rate=1e-3, options=tiny_step_options("fp32"))
    actual = train_window(half, batches, samples=3, learning_rate=1e-3, options=tiny_step_options("fp16"))
    assert actual.loss == pytest.approx(expected.loss, rel=1e-2)
    assert actual.grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)  # unscaled
    assert half.loss_scaler.state() == {"scale": 1024.0, "streak": 1}


def test_fp16_overflows_halve_the_scale_until_a_window_is_finite() -> None:
    state = tiny_expert_state("fp16", ema=0.9)
    assert state.loss_scaler is not None
    state.loss_scaler.scale = 2.0**24
    before = snapshot_state(state)
    batches = [replace(build_batch([1, 2], 3), latents=build_batch([1, 2], 3).latents * 30)]
    results = []
    while not results or results[-1].overflowed:
        assert same_bits(before, snapshot_state(state))
        assert state.loss_scaler.scale == 2.0 ** (24 - len(results))
        results.append(train_window(state, batches, samples=2, learning_rate=1e-3, options=tiny_step_options("fp16")))
        assert math.isfinite(results[-1].loss)
    assert len(results) > 3 and results[-1].finite
    assert not any(result.finite for result in results[:-1])
    assert not same_bits(before, snapshot_state(state))


def test_a_loss_that_is_not_finite_does_not_change_the_scale() -> None:
    state = tiny_expert_state("fp16")
    assert state.loss_scaler is not None
    bad = build_batch([1], 3)
    bad.latents[0] = math.nan
    result = train_window(state, [bad], samples=1, learning_rate=1e-3, options=tiny_step_options("fp16"))
    assert not result.finite and not result.overflowed
    assert state.loss_scaler.state() == {"scale": 65536.0, "streak": 0}


def test_a_module_without_gradient_checkpointing_raises_an_error_with_its_name() -> None:
    with pytest.raises(TrainError, match=r"train.gradient_checkpointing is true, but TinyDenoiser does not"):
        prepare_for_training(TinyDenoiser(), checkpointing=True)
    prepare_for_training(TinyDenoiser(), checkpointing=False)


@pytest.mark.parametrize("optimizer", ["adamw", "schedule_free"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_the_same_function_runs_on_fake_tensors(optimizer: str, precision: str, tiny_wan: ModelSource) -> None:
    """The window reads values only through `copy_to_host`: fake tensors have no values."""
    options = wan_step_options(tiny_wan, precision, max_grad_norm=1.0)  # type: ignore[arg-type]
    copied_shapes: list[torch.Size] = []

    def copy_to_host(figures: torch.Tensor) -> tuple[float, ...]:
        copied_shapes.append(figures.shape)
        return (0.0, 1.0)

    real = wan_lora_state(tiny_wan, precision, checkpointing=True)  # type: ignore[arg-type]
    mode = FakeTensorMode()
    parameters = replace_with_fake_tensors(real.module, mode)
    with mode:
        state = build_expert_state(real.module, parameters, optimizer=optimizer, ema=0.9)
        state.loss_scaler = options.precision.scaler()
        batches = [build_wan_batch([1, 2], 4), build_wan_batch([3], 6)]
        result = train_window(
            state, batches, samples=3, learning_rate=1e-3, options=replace(options, copy_to_host=copy_to_host)
        )
    assert result.finite
    assert copied_shapes == [torch.Size([5])]
    assert len(state.optimizer.torch_optimizer.state) == len(state.parameters) == len(real.parameters) > 0


def test_figures_are_copied_to_the_host_once_per_window() -> None:
    calls: list[int] = []

    def copy_to_host(figures: torch.Tensor) -> list[float]:
        calls.append(len(figures))
        return list(figures.tolist())

    batches = [build_batch([n], 3) for n in range(4)]
    train_window(
        tiny_expert_state(),
        batches,
        samples=4,
        learning_rate=1e-3,
        options=replace(tiny_step_options(), copy_to_host=copy_to_host),
    )
    assert calls == [6]
