"""Trainable experts: repeatable initial values, only selected parameters are trained, and state exact to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from supertuner.config.settings.model import AdapterSettings
from supertuner.core.errors import ModelError
from supertuner.models.adapters.attach import (
    TrainableExpert,
    attach,
    load_trainable_state,
    resolve_targets,
    temporary_weights,
    trainable_state,
)
from tests.models.adapters.modules import (
    flux,
    flux_output,
    stable_audio,
    stable_audio_output,
    wan,
    wan_output,
)

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
LORA = AdapterSettings(rank=4, alpha=2.0)
FULL = AdapterSettings(type="full")


def on_wan(settings: AdapterSettings = LORA, seed: int = 1, module: nn.Module | None = None) -> TrainableExpert:
    return attach(wan() if module is None else module, settings, ATTENTION, seed=seed, name="high_noise")


def stepped(trained: TrainableExpert, forward: Callable[[nn.Module], torch.Tensor], steps: int = 1) -> None:
    optimizer = torch.optim.Adam(trained.parameters.values(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        forward(trained.module).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "make, forward",
    [(wan, wan_output), (flux, flux_output), (stable_audio, stable_audio_output)],
    ids=["wan", "flux", "a model without add_adapter"],
)
def test_only_the_adapter_is_trained_and_all_of_it(
    make: Callable[[], nn.Module], forward: Callable[[nn.Module], torch.Tensor]
) -> None:
    module = make()
    before = {name.replace(".base_layer", ""): tensor.clone() for name, tensor in module.state_dict().items()}
    untouched = forward(module)
    trained = attach(module, LORA, ATTENTION, seed=1, name="model")
    assert torch.equal(forward(module), untouched), "a new adapter changes nothing"
    stepped(trained, forward)  # after this B is not zero
    stepped(trained, forward)
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in trained.parameters.values())
    assert not torch.equal(forward(module), untouched)
    after = {name.replace(".base_layer", ""): tensor for name, tensor in module.state_dict().items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {name.replace(".default.", ".") for name in after} - set(before) == set(trained.parameters)


def test_parameter_names_do_not_contain_the_adapters_name() -> None:
    names = list(on_wan().parameters)
    assert names[:2] == ["blocks.0.attn1.to_q.lora_A.weight", "blocks.0.attn1.to_q.lora_B.weight"]
    assert len(names) == 2 * 2 * 4 * 2  # A and B, two blocks, four layers, self and cross attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_adapter_is_fp32_on_a_base_of_any_format(dtype: torch.dtype) -> None:
    module = wan()
    nn.Module.to(module, dtype)  # not diffusers' own `to`, which logs a warning
    trained = on_wan(module=module)
    assert {parameter.dtype for parameter in trained.parameters.values()} == {torch.float32}
    assert module.blocks[0].attn1.to_q.base_layer.weight.dtype == dtype
    before = trainable_state(trained)

    def forward(module: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return wan_output(module)

    stepped(trained, forward, 2)
    assert all(torch.isfinite(parameter).all() for parameter in trained.parameters.values())
    assert all(not torch.equal(before[name], parameter) for name, parameter in trained.parameters.items())


def test_full_training_trains_every_weight_in_fp32() -> None:
    module = wan().bfloat16()
    trained = on_wan(FULL, module=module)
    assert trained.adapter_type == "full" and list(trained.parameters) == [
        name for name, _ in module.named_parameters()
    ]
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in module.parameters())
    before = trainable_state(trained)
    stepped(trained, wan_output)
    assert all(not torch.equal(before[name], parameter) for name, parameter in trained.parameters.items())


def test_initial_values_do_not_depend_on_the_global_random_state() -> None:
    first = trainable_state(on_wan())
    torch.rand(17)
    before = torch.random.get_rng_state()
    second = trainable_state(on_wan())
    assert torch.equal(before, torch.random.get_rng_state()), "the global random state stays"
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = trainable_state(on_wan(seed=2))
    assert not any(torch.equal(first[name], other[name]) for name in first if "lora_A" in name)


def test_initial_values_differ_between_experts_and_between_layers() -> None:
    high = trainable_state(on_wan())
    low = trainable_state(attach(wan(), LORA, ATTENTION, seed=1, name="low_noise"))
    name, neighbour = "blocks.0.attn1.to_q.lora_A.weight", "blocks.0.attn1.to_k.lora_A.weight"
    assert not torch.equal(high[name], low[name]) and not torch.equal(high[name], high[neighbour])


def test_initial_values_have_the_distribution_of_peft() -> None:
    """Kaiming-uniform with a = √5 is uniform within 1/√inputs; B is zero."""
    for name, tensor in trainable_state(on_wan()).items():
        if "lora_B" in name:
            assert not tensor.any()
        else:
            bound = tensor.shape[1] ** -0.5
            assert 0.8 * bound < tensor.abs().max() <= bound


def test_alpha_scales_the_adapters_output() -> None:
    outputs = {}
    for alpha in (4.0, 8.0, None):
        module = nn.Sequential(nn.Linear(6, 6))
        nn.init.zeros_(module[0].weight), nn.init.zeros_(module[0].bias)  # type: ignore[arg-type]
        trained = attach(module, AdapterSettings(rank=4, alpha=alpha), ["0"], seed=1, name="model")
        load_trainable_state(
            trained, {name: torch.ones_like(tensor) for name, tensor in trainable_state(trained).items()}
        )
        outputs[alpha] = module(torch.ones(1, 6))
    assert torch.equal(outputs[8.0], 2 * outputs[4.0]) and torch.equal(outputs[None], outputs[4.0])


def test_dropout_acts_on_the_adapter_and_only_in_training_mode() -> None:
    trained = on_wan(AdapterSettings(rank=4, dropout=0.5))
    load_trainable_state(trained, {name: tensor + 0.1 for name, tensor in trainable_state(trained).items()})
    module = trained.module.eval()
    assert torch.equal(wan_output(module), wan_output(module))
    module.train()
    assert not torch.equal(wan_output(module), wan_output(module))


def test_a_state_loaded_into_a_new_module_gives_the_same_output_to_the_bit() -> None:
    trained = on_wan()
    stepped(trained, wan_output, 3)
    state = trainable_state(trained)
    fresh = on_wan(seed=9)
    parameters = dict(fresh.parameters)
    load_trainable_state(fresh, state)
    assert all(fresh.parameters[name] is parameter for name, parameter in parameters.items())
    assert torch.equal(wan_output(fresh.module), wan_output(trained.module))


def test_a_state_is_a_copy() -> None:
    trained = on_wan()
    state = trainable_state(trained)
    stepped(trained, wan_output)
    assert not torch.equal(
        state["blocks.0.attn1.to_q.lora_B.weight"], trained.parameters["blocks.0.attn1.to_q.lora_B.weight"]
    )
    assert all(tensor.device.type == "cpu" and not tensor.requires_grad for tensor in state.values())


NAME = "blocks.0.attn1.to_q.lora_A.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tensors: tensors.pop(NAME), f"1 are missing ({NAME})"),
        (lambda tensors: tensors.update(other=torch.ones(1)), "1 are unexpected (other)"),
        (lambda tensors: tensors.update({NAME: torch.ones(8, 24)}), "is (8, 24) torch.float32, not (4, 24)"),
        (lambda tensors: tensors.update({NAME: tensors[NAME].half()}), "is (4, 24) torch.float16, not (4, 24) torch.f"),
    ],
    ids=["missing", "unexpected", "misshapen", "another number format"],
)
def test_tensors_that_do_not_match_raise_an_error_and_change_nothing(
    change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    trained = on_wan()
    before, tensors = trainable_state(trained), {name: tensor + 1 for name, tensor in trainable_state(trained).items()}
    change(tensors)
    with pytest.raises(ModelError) as caught:
        load_trainable_state(trained, tensors)
    assert message in str(caught.value) and "high_noise" in str(caught.value)
    with pytest.raises(ModelError), temporary_weights(trained, tensors):
        raise AssertionError("the block must not be entered")
    assert all(torch.equal(before[name], parameter) for name, parameter in trained.parameters.items())


@pytest.mark.parametrize("settings", [LORA, FULL], ids=["lora", "full"])
def test_temporary_weights_restore_the_same_bits(settings: AdapterSettings) -> None:
    trained = on_wan(settings)
    stepped(trained, wan_output)
    average = {name: tensor * 0.5 for name, tensor in trainable_state(trained).items()}
    with torch.no_grad():
        trained.parameters[next(iter(trained.parameters))].flatten()[0] = (
            torch.nan
        )  # a bit pattern that compares unequal
    before = {name: (parameter.data_ptr(), _bits(parameter)) for name, parameter in trained.parameters.items()}
    with temporary_weights(trained, average):
        inside = wan_output(trained.module)
        assert torch.isfinite(inside).all()
    with pytest.raises(ZeroDivisionError), temporary_weights(trained, average):
        raise ZeroDivisionError
    after = {name: (parameter.data_ptr(), _bits(parameter)) for name, parameter in trained.parameters.items()}
    assert after == before
    load_trainable_state(trained, average)
    assert torch.equal(wan_output(trained.module), inside)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


def test_an_unknown_target_raises_an_error_with_similar_names() -> None:
    with pytest.raises(ModelError, match=r"no module of high_noise has the name 'to_w'; did you mean to_v, to_q, to_k"):
        attach(wan(), LORA, ["to_q", "to_w"], seed=1, name="high_noise")
    with pytest.raises(ModelError, match=r"'xyzzy'; use one of patch_embedding, .*attn1\.to_q.* and 5 more"):
        attach(wan(), LORA, ["xyzzy"], seed=1, name="high_noise")


def test_a_target_that_is_not_a_layer_raises_an_error_with_the_layers_inside_it() -> None:
    with pytest.raises(ModelError, match=r"blocks\.0\.attn1 of model is a WanAttention.*attn1\.to_q, attn1\.to_k"):
        attach(wan(), LORA, ["attn1"], seed=1, name="model")


def test_targets_are_a_preset_or_a_list() -> None:
    presets = {"attention": ATTENTION, "all_linear": (*ATTENTION, "ffn.net.2")}
    assert resolve_targets(AdapterSettings(), presets) == ATTENTION
    assert resolve_targets(AdapterSettings(targets=("ffn.net.2",)), presets) == ("ffn.net.2",)
    with pytest.raises(ModelError, match="'mlp', which is not a preset of this family \\(attention, all_linear\\)"):
        resolve_targets(AdapterSettings(targets="mlp"), presets)
