"""The optimizer registry: learning rates, limits of Automagic, and that every optimizer trains."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest
import torch
from torch import nn

from supertuner.config.settings.optim import OptimizerSettings
from supertuner.core.errors import TrainError
from supertuner.optim.automagic.rate_grid import LearningRateLimits
from supertuner.optim.optimizer_registry import OPTIMIZERS, automagic_limits, build_optimizer, learning_rate_for
from tests.optim.optimizer_builders import NAMES, build_named_optimizer, build_weights, same_bits, train_steps


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_lowers_a_simple_loss(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 128, generator=generator))
    target = torch.randn(64, 128, generator=generator)
    automagic = {"learning_rate": 0.05, "min_lr": 0.01, "max_lr": 0.1, "lr_bump": 0.001}
    settings = {"prodigy": {}, "adafactor": {}, "automagic": automagic}.get(name, {"learning_rate": 0.05})
    trained = build_named_optimizer(name, {"w": weight}, weight_decay=0.0, **settings)
    first = (weight.detach() - target).square().mean()
    for _ in range(60):
        (weight - target).square().mean().backward()
        trained.step()
        trained.zero_grad()
    assert (weight.detach() - target).square().mean() < 0.8 * first


@pytest.mark.parametrize("name", NAMES)
def test_a_learning_rate_near_zero_changes_no_weight(name: str) -> None:
    parameters = build_weights()
    before = {key: p.detach().clone() for key, p in parameters.items()}
    optimizer = build_named_optimizer(name, parameters)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.set_learning_rate(1e-30)
    optimizer.step()
    assert all(torch.allclose(p, before[key], atol=1e-12, rtol=0) for key, p in parameters.items())


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_comes_from_the_settings_or_from_the_registry(name: str) -> None:
    group = build_named_optimizer(name, build_weights(), weight_decay=0.25).torch_optimizer.param_groups[0]
    assert group["weight_decay"] == 0.25
    group = build_named_optimizer(name, build_weights()).torch_optimizer.param_groups[0]
    assert group["weight_decay"] == OPTIMIZERS[name].weight_decay


def test_prodigy_prints_nothing_about_weight_decay() -> None:
    screen = io.StringIO()
    with redirect_stdout(screen):
        build_named_optimizer("prodigy", build_weights(), weight_decay=0.1)
    assert screen.getvalue() == ""


def test_an_expert_uses_its_own_rate_then_the_shared_rate_then_the_default() -> None:
    own = OptimizerSettings(learning_rate=1e-3, high_noise_lr=2e-3)
    assert learning_rate_for(own, "high_noise") == 2e-3
    assert learning_rate_for(own, "low_noise") == 1e-3
    assert learning_rate_for(own, "model") == 1e-3
    assert learning_rate_for(OptimizerSettings(low_noise_lr=5e-5), "high_noise") == OPTIMIZERS["adamw"].learning_rate
    assert learning_rate_for(OptimizerSettings(name="prodigy"), "model") == 1.0
    assert build_optimizer(own, build_weights(), "high_noise").base_learning_rate == 2e-3


def test_limits_of_an_expert_apply_with_or_without_shared_limits() -> None:
    """The GH200 forks read an expert's keys only if the shared keys are set too."""
    per_expert = {
        "high_noise_lr_bump": 1e-6,
        "low_noise_lr_bump": 5e-7,
        "high_noise_max_lr": 1e-3,
        "low_noise_max_lr": 5e-4,
    }
    settings = OptimizerSettings.model_validate({"name": "automagic", **per_expert})
    assert automagic_limits(settings, "high_noise") == LearningRateLimits(
        start=1e-6, bump=1e-6, lowest=1e-7, highest=1e-3
    )
    assert automagic_limits(settings, "low_noise") == LearningRateLimits(
        start=1e-6, bump=5e-7, lowest=1e-7, highest=5e-4
    )
    base = OptimizerSettings.model_validate(
        {"name": "automagic", "lr_bump": 2e-6, "low_noise_min_lr": 1e-8, **per_expert}
    )
    assert automagic_limits(base, "low_noise") == LearningRateLimits(start=1e-6, bump=5e-7, lowest=1e-8, highest=5e-4)
    assert automagic_limits(base, "model") == LearningRateLimits(start=1e-6, bump=2e-6, lowest=1e-7, highest=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"learning_rate": 0.1},
            r"^optimizer\.learning_rate 0\.1, .* not between min_lr 1e-07 \(unset\) and max_lr",
        ),
        ({"low_noise_lr": 0.1, "learning_rate": 1e-6}, r"^optimizer\.low_noise_lr 0\.1, .*; remove it or widen"),
        ({"lr_bump": 0.5}, r"^optimizer\.lr_bump 0\.5 is larger than the range from .*; set a smaller bump"),
    ],
)
def test_conflicting_rates_and_limits_raise_an_error(settings: dict[str, float], message: str) -> None:
    with pytest.raises(TrainError, match=message):
        automagic_limits(OptimizerSettings.model_validate({"name": "automagic", **settings}), "low_noise")


def test_limits_that_suit_two_experts_but_not_a_single_one_raise_an_error() -> None:
    both = {"min_lr": 0.01, "high_noise_max_lr": 0.1, "low_noise_max_lr": 0.1}
    settings = OptimizerSettings.model_validate({"name": "automagic", **both})
    assert automagic_limits(settings, "low_noise").highest == 0.1
    with pytest.raises(TrainError, match=r"^max_lr 0\.001 \(unset\) is below optimizer\.min_lr 0\.01; .*: set both"):
        automagic_limits(settings, "model")


def test_the_default_start_and_bump_adapt_to_the_limits() -> None:
    settings = OptimizerSettings.model_validate({"name": "automagic", "min_lr": 1e-5})
    assert learning_rate_for(settings, "model") == 1e-5
    narrow = OptimizerSettings.model_validate({"name": "automagic", "max_lr": 5e-7})
    assert automagic_limits(narrow, "model") == LearningRateLimits(
        start=5e-7, bump=5e-7 - 1e-7, lowest=1e-7, highest=5e-7
    )
    fixed = OptimizerSettings.model_validate({"name": "automagic", "min_lr": 1e-4, "max_lr": 1e-4})
    assert automagic_limits(fixed, "model").bump == 1e-6


def test_an_expert_without_trainable_parameters_raises_an_error() -> None:
    with pytest.raises(TrainError, match="high_noise has no trainable parameters"):
        build_optimizer(OptimizerSettings(), {}, "high_noise")


def test_adamw_is_fused_on_this_machine() -> None:
    assert build_named_optimizer("adamw", build_weights()).torch_optimizer.param_groups[0]["fused"] is True


def test_adamw8bit_stores_large_moments_in_8_bits() -> None:
    parameters = build_weights()
    optimizer = build_named_optimizer("adamw8bit", parameters)
    train_steps(optimizer, 0, 1)
    moments = optimizer.torch_optimizer.state[parameters["blocks.0.lora_A.weight"]]
    assert moments["exp_avg"].codes.dtype == torch.uint8


@pytest.mark.parametrize("name", [name for name in NAMES if name != "schedule_free"])
def test_only_schedule_free_has_averaged_weights(name: str) -> None:
    assert build_named_optimizer(name, build_weights()).averaged_weights() is None


def test_averaged_weights_equal_those_of_schedule_frees_own_eval_mode() -> None:
    parameters = build_weights()
    optimizer = build_named_optimizer("schedule_free", parameters)
    assert same_bits(optimizer.averaged_weights() or {}, parameters)  # before the first step they are the parameters
    train_steps(optimizer, 0, 5)
    averaged = optimizer.averaged_weights()
    assert averaged is not None
    assert not torch.equal(averaged["blocks.0.lora_A.weight"], parameters["blocks.0.lora_A.weight"])
    optimizer.torch_optimizer.eval()  # type: ignore[attr-defined]
    assert all(torch.allclose(averaged[key], p, atol=1e-7) for key, p in parameters.items())


def test_reading_averaged_weights_changes_no_bit_of_the_training() -> None:
    unread, read = (
        build_named_optimizer("schedule_free", build_weights()),
        build_named_optimizer("schedule_free", build_weights()),
    )
    for step in range(12):
        train_steps(unread, step, step + 1)
        train_steps(read, step, step + 1)
        for copy in (read.averaged_weights() or {}).values():
            copy.zero_()  # the result is a copy, so changing it has no effect
    assert same_bits(unread.parameters, read.parameters)


def test_lion_steps_by_the_sign_of_its_average_of_gradients() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = build_named_optimizer("lion", {"w": weight}, learning_rate=0.1, weight_decay=0.5)
    optimizer.set_learning_rate(0.1)
    average, expected = torch.zeros(3), weight.detach().clone()
    for gradient in (torch.tensor([0.5, -1.0, 0.0]), torch.tensor([-0.01, 4.0, 1.0])):
        weight.grad = gradient.clone()
        optimizer.step()
        expected = expected - 0.1 * (torch.sign(0.9 * average + 0.1 * gradient) + 0.5 * expected)
        average = 0.99 * average + 0.01 * gradient
        assert torch.allclose(weight.detach(), expected)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "prodigy", "schedule_free", "lion"])
def test_betas_and_epsilon_come_from_the_settings(name: str) -> None:
    settings = {} if name == "lion" else {"epsilon": 1e-6}
    optimizer = build_named_optimizer(name, build_weights(), beta1=0.8, beta2=0.95, **settings)
    group = optimizer.torch_optimizer.param_groups[0]
    assert tuple(group["betas"]) == (0.9 if name == "schedule_free" else 0.8, 0.95)
    assert group.get("eps") == settings.get("epsilon")
    defaults = build_named_optimizer(name, build_weights()).torch_optimizer.param_groups[0]["betas"]
    assert tuple(defaults) == (0.9, 0.99 if name == "lion" else 0.999)
