"""What a window changes, and what it leaves alone: clipping, averages, windows that are not finite, dropout, fp16."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from supertuner.core.errors import TrainError
from supertuner.models.spec import Source
from supertuner.optim.schedule import rate_factor
from supertuner.optim.state import pack
from supertuner.step.window import Trainee, evaluation_weights, held_out_loss, prepare, train_window
from tests.optim.training import same_bits
from tests.step.making import (
    Changing,
    Kept,
    Little,
    batch_of,
    faked,
    little,
    little_rules,
    trainee,
    wan_batch,
    wan_lora,
    wan_rules,
)


def everything(one: Trainee) -> dict[str, torch.Tensor]:
    """All that a window may change, in copies."""
    found = {f"weight {name}": p.detach().clone() for name, p in one.parameters.items()}
    tensors, meta = pack(one.optimizer)
    found |= {f"optimizer {name}": tensor for name, tensor in tensors.items()}
    if one.ema is not None:
        averages, updates = one.ema.state()
        found |= {f"average {name}": tensor for name, tensor in averages.items()}
        found["updates"] = torch.tensor(updates)
    found["meta"] = torch.tensor(list(repr(meta).encode()), dtype=torch.uint8)
    return found


def steps(one: Trainee, count: int, begin: int = 0) -> None:
    for step in range(begin, begin + count):
        batches = [batch_of([2 * step], 3), batch_of([2 * step + 1], 4)]
        rate = one.optimizer.base_rate * rate_factor(step, 20, "cosine", 3)
        assert train_window(one, batches, samples=2, rate=rate, rules=little_rules()).finite


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "adafactor", "prodigy", "schedule_free"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_window_that_is_not_finite_changes_nothing_and_names_its_samples(optimizer: str, value: float) -> None:
    one = little(optimizer=optimizer, ema=0.9)
    steps(one, 3)
    before = everything(one)
    bad = batch_of([8, 9], 3)
    bad.latents[1, 0, 0, 0] = value
    result = train_window(one, [batch_of([7], 4), bad], samples=3, rate=1e-3, rules=little_rules())
    assert not result.finite and not result.overflowed
    assert result.suspects == (9,)
    assert same_bits(before, everything(one))
    assert all(p.grad is None for p in one.parameters.values())
    other = little(optimizer=optimizer, ema=0.9)
    steps(other, 3)
    steps(one, 2, begin=3)
    steps(other, 2, begin=3)
    assert same_bits(everything(one), everything(other))


def test_a_gradient_that_is_not_finite_makes_every_sample_a_suspect() -> None:
    one = little()

    def spoil(parameters: object) -> None:
        one.parameters["outer.bias"].grad = torch.full((4,), math.inf)

    before = everything(one)
    result = train_window(
        one, [batch_of([1, 2], 3)], samples=2, rate=1e-3, rules=little_rules(), reduction=Changing(spoil)
    )
    assert math.isfinite(result.loss) and not result.finite
    assert result.suspects == (1, 2)
    assert same_bits(before, everything(one))


def test_gradients_longer_than_the_limit_are_shortened_to_it_together() -> None:
    free, limited, kept = little(), little(), Kept()
    batches = [batch_of([1, 2, 3], 3)]
    result = train_window(free, batches, samples=3, rate=1e-3, rules=little_rules(), reduction=kept)
    limit = result.grad_norm / 3
    clipped = train_window(limited, batches, samples=3, rate=1e-3, rules=little_rules(max_grad_norm=limit))
    assert clipped.grad_norm == result.grad_norm  # what is reported is the norm before
    first_moments = [limited.optimizer.inner.state[p]["exp_avg"] for p in limited.parameters.values()]
    for moment, gradient in zip(first_moments, kept.gradients, strict=True):
        assert torch.allclose(moment, 0.1 * gradient / 3, rtol=1e-4, atol=1e-9)


def test_a_limit_that_is_not_reached_changes_no_bit() -> None:
    free, limited = little(), little()
    for one, limit in ((free, None), (limited, 1e6)):
        train_window(one, [batch_of([1, 2], 3)], samples=2, rate=1e-3, rules=little_rules(max_grad_norm=limit))
    assert same_bits(everything(free), everything(limited))


def test_the_norm_is_that_of_all_gradients_together() -> None:
    kept = Kept()
    result = train_window(little(), [batch_of([1], 3)], samples=1, rate=1e-3, rules=little_rules(), reduction=kept)
    assert result.grad_norm == pytest.approx(float(torch.cat([g.flatten() for g in kept.gradients]).norm()), rel=1e-6)


def test_a_window_updates_the_average_after_the_weights() -> None:
    one = little(ema=0.9)
    start = {name: p.detach().clone() for name, p in one.parameters.items()}
    steps(one, 1)
    assert one.ema is not None and one.ema.updates == 1
    for name, parameter in one.parameters.items():
        expected = 0.1 * start[name] + 0.9 * parameter.detach()
        assert torch.allclose(one.ema.averages[name], expected, atol=1e-7)


def test_what_is_validated_is_the_average_or_what_schedule_free_means_or_the_weights() -> None:
    averaged, free, plain = little(ema=0.9), little(optimizer="schedule_free"), little()
    for one in (averaged, free, plain):
        steps(one, 2)
    assert averaged.ema is not None
    assert same_bits(evaluation_weights(averaged) or {}, averaged.ema.averages)
    assert same_bits(evaluation_weights(free) or {}, free.optimizer.averaged() or {})
    assert evaluation_weights(plain) is None


def test_the_rate_is_the_one_that_is_given() -> None:
    slow, fast = little(), little()
    start = {name: p.detach().clone() for name, p in slow.parameters.items()}
    for one, rate in ((slow, 1e-4), (fast, 1e-3)):
        train_window(one, [batch_of([1], 3)], samples=1, rate=rate, rules=little_rules())
    moved = [float((one.parameters["inner.bias"].detach() - start["inner.bias"]).abs().mean()) for one in (slow, fast)]
    assert moved[1] == pytest.approx(10 * moved[0], rel=0.05)


def test_windows_of_different_cuts_end_near_each_other_after_many_steps() -> None:
    small, large = little(), little()
    for step in range(20):
        positions = range(6 * step, 6 * step + 6)
        pieces = [batch_of(positions[n : n + 2], 3) for n in (0, 2, 4)]
        train_window(small, pieces, samples=6, rate=1e-3, rules=little_rules())
        train_window(large, [batch_of(positions, 3)], samples=6, rate=1e-3, rules=little_rules())
    for name, parameter in small.parameters.items():
        assert torch.allclose(parameter, large.parameters[name], atol=1e-5)


def test_held_out_loss_is_that_of_the_forward_pass_and_leaves_everything_alone() -> None:
    one = little()
    one.module.append_dropout = nn.Dropout(0.5)  # type: ignore[assignment]
    one.module.train()
    one.module.inner.eval()  # type: ignore[union-attr]
    before = everything(one)
    losses = held_out_loss(one, [batch_of([1, 2], 3), batch_of([3], 4)], little_rules())
    again = held_out_loss(one, [batch_of([1], 3), batch_of([2], 3), batch_of([3], 4)], little_rules())
    assert losses.shape == (3,) and not losses.requires_grad
    assert torch.allclose(losses, again, rtol=1e-6)
    assert same_bits(before, everything(one))
    assert [part.training for part in one.module.modules()] == [True, False, True, True, True]
    assert held_out_loss(one, [], little_rules()).shape == (0,)


def test_validating_in_the_middle_changes_no_bit_of_the_training(tiny_wan: Source) -> None:
    quiet, asked = (wan_lora(tiny_wan, "bf16", dropout=0.3) for _ in range(2))
    rules = wan_rules(tiny_wan, "bf16", max_grad_norm=0.5)
    for step in range(3):
        batches = [wan_batch([step], 4, dtype=torch.bfloat16)]
        for one in (quiet, asked):
            train_window(one, batches, samples=1, rate=1e-3, rules=rules, seed=step)
        held_out_loss(asked, [wan_batch([50, 51], 6, dtype=torch.bfloat16)], rules)
        torch.rand(step + 1)
    assert same_bits(everything(quiet), everything(asked))


def test_dropout_is_a_function_of_the_windows_seed_and_draws_on_nobody_elses_numbers(tiny_wan: Source) -> None:
    def window(seed: int | None) -> Kept:
        kept = Kept()
        one = wan_lora(tiny_wan, "fp32", dropout=0.5)
        rules = wan_rules(tiny_wan, "fp32")
        train_window(one, [wan_batch([1], 4)], samples=1, rate=1e-3, rules=rules, reduction=kept, seed=seed)
        return kept

    state = torch.get_rng_state()
    first, same, other = window(5), window(5), window(6)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(*pair) for pair in zip(first.gradients, same.gradients, strict=True))
    assert not all(torch.equal(*pair) for pair in zip(first.gradients, other.gradients, strict=True))


def test_fp16_with_its_scaler_has_nearly_the_gradient_of_fp32() -> None:
    exact, half = little(), little("fp16")
    assert half.scaler is not None and exact.scaler is None
    half.scaler.scale = 1024.0
    batches = [batch_of([1, 2], 3), batch_of([3], 4)]
    wanted = train_window(exact, batches, samples=3, rate=1e-3, rules=little_rules("fp32"))
    found = train_window(half, batches, samples=3, rate=1e-3, rules=little_rules("fp16"))
    assert found.loss == pytest.approx(wanted.loss, rel=1e-2)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-2)  # unscaled
    assert half.scaler.state() == {"scale": 1024.0, "streak": 1}


def test_an_overflow_of_fp16_halves_the_scale_until_training_goes_on() -> None:
    one = little("fp16", ema=0.9)
    assert one.scaler is not None
    one.scaler.scale = 2.0**24
    before = everything(one)
    batches = [replace(batch_of([1, 2], 3), latents=batch_of([1, 2], 3).latents * 30)]
    results = []
    while not results or results[-1].overflowed:
        assert same_bits(before, everything(one))
        assert one.scaler.scale == 2.0 ** (24 - len(results))
        results.append(train_window(one, batches, samples=2, rate=1e-3, rules=little_rules("fp16")))
        assert math.isfinite(results[-1].loss)
    assert len(results) > 3 and results[-1].finite
    assert not any(result.finite for result in results[:-1])
    assert not same_bits(before, everything(one))


def test_a_loss_that_is_not_finite_is_not_the_scales_fault() -> None:
    one = little("fp16")
    assert one.scaler is not None
    bad = batch_of([1], 3)
    bad.latents[0] = math.nan
    result = train_window(one, [bad], samples=1, rate=1e-3, rules=little_rules("fp16"))
    assert not result.finite and not result.overflowed
    assert one.scaler.state() == {"scale": 65536.0, "streak": 0}


def test_a_module_that_cannot_recompute_is_refused_by_name() -> None:
    with pytest.raises(TrainError, match=r"train.gradient_checkpointing is true, and Little cannot"):
        prepare(Little(), checkpointing=True)
    prepare(Little(), checkpointing=False)


@pytest.mark.parametrize("optimizer", ["adamw", "schedule_free"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_the_same_function_runs_on_fake_tensors(optimizer: str, precision: str, tiny_wan: Source) -> None:
    """No value is read except through `fetch`: on fake tensors there is none to read."""
    rules = wan_rules(tiny_wan, precision, max_grad_norm=1.0)  # type: ignore[arg-type]
    asked: list[torch.Size] = []

    def fetch(figures: torch.Tensor) -> tuple[float, ...]:
        asked.append(figures.shape)
        return (0.0, 1.0)

    real = wan_lora(tiny_wan, precision, checkpointing=True)  # type: ignore[arg-type]
    mode = FakeTensorMode()
    parameters = faked(real.module, mode)
    with mode:
        one = trainee(real.module, parameters, optimizer=optimizer, ema=0.9)
        one.scaler = rules.precision.scaler()
        batches = [wan_batch([1, 2], 4), wan_batch([3], 6)]
        result = train_window(one, batches, samples=3, rate=1e-3, rules=rules, fetch=fetch)
    assert result.finite
    assert asked == [torch.Size([5])]
    assert len(one.optimizer.inner.state) == len(one.parameters) == len(real.parameters) > 0


def test_figures_come_to_the_host_once_per_window() -> None:
    calls: list[int] = []

    def fetch(figures: torch.Tensor) -> list[float]:
        calls.append(len(figures))
        return list(figures.tolist())

    batches = [batch_of([n], 3) for n in range(4)]
    train_window(little(), batches, samples=4, rate=1e-3, rules=little_rules(), fetch=fetch)
    assert calls == [6]
