"""Each adapter type on several models: only the adapter is trained, all of it is, and its state is exact to the bit."""

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
    settings_for_expert,
    temporary_weights,
    trainable_state,
)
from supertuner.models.quantization import quantize_blocks
from tests.models.adapters.modules import flux, flux_output, random_tensor, wan, wan_output

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
KINDS = {
    "lora": AdapterSettings(rank=4, alpha=2.0),
    "dora": AdapterSettings(rank=4, alpha=2.0, dora=True),
    "rslora": AdapterSettings(rank=4, alpha=2.0, rslora=True),
    "locon": AdapterSettings(type="locon", rank=4, alpha=2.0),
    "loha": AdapterSettings(type="loha", rank=4, alpha=2.0),
    "lokr": AdapterSettings(type="lokr", rank=2, alpha=1.0),
    "lokr, factor 2": AdapterSettings(type="lokr", rank=2, alpha=1.0, lokr_factor=2),
    "lokr, whole": AdapterSettings(type="lokr", lokr_full_matrix=True),
    "diff": AdapterSettings(type="diff"),
}
SHAPES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.Tensor], tuple[str, ...]]] = {
    "wan": (wan, wan_output, ATTENTION),
    "wan, all layers": (wan, wan_output, (*ATTENTION, "ffn.net.0.proj", "ffn.net.2", "patch_embedding", "proj_out")),
    "flux": (flux, flux_output, (*ATTENTION, "proj_mlp", "ff.net.2")),
}
EVERY_KIND = pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
EVERY_SHAPE = pytest.mark.parametrize("make, forward, targets", SHAPES.values(), ids=SHAPES)


def on_wan(settings: AdapterSettings, seed: int = 1, module: nn.Module | None = None) -> TrainableExpert:
    return attach(wan() if module is None else module, settings, ATTENTION, seed=seed, name="high_noise")


def stepped(
    trained: TrainableExpert, forward: Callable[[nn.Module], torch.Tensor] = wan_output, steps: int = 1
) -> None:
    optimizer = torch.optim.Adam(trained.parameters.values(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        forward(trained.module).square().mean().backward()
        optimizer.step()


@EVERY_SHAPE
@EVERY_KIND
def test_all_of_the_adapter_is_trained_and_nothing_else(
    settings: AdapterSettings,
    make: Callable[[], nn.Module],
    forward: Callable[[nn.Module], torch.Tensor],
    targets: tuple[str, ...],
) -> None:
    module = make()
    before = {name: tensor.clone() for name, tensor in module.named_parameters()}
    untouched = forward(module)
    trained = attach(module, settings, targets, seed=1, name="model")
    first = trainable_state(trained)
    assert torch.equal(forward(module), untouched), "a new adapter changes nothing"
    stepped(trained, forward, 3)
    assert all(not torch.equal(first[name], parameter) for name, parameter in trained.parameters.items())
    assert not torch.equal(forward(module), untouched)
    learning = {id(parameter) for parameter in trained.parameters.values()}
    others = {
        name.replace(".base_layer", ""): parameter
        for name, parameter in module.named_parameters()
        if id(parameter) not in learning
    }
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in others.values())
    assert all(torch.equal(before[name], parameter) for name, parameter in others.items())
    layers = {name for name in before if name.rpartition(".")[0] in trained.layers}
    assert set(others) == (set(before) - layers if settings.type == "diff" else set(before))
    assert {name.split(".lo")[0].split(".hada")[0] for name in trained.parameters if settings.type != "diff"} == (
        set(trained.layers) if settings.type != "diff" else set()
    )


@EVERY_KIND
def test_an_adapter_is_fp32_and_trains_on_a_bf16_base(settings: AdapterSettings) -> None:
    module = wan()
    nn.Module.to(module, torch.bfloat16)
    trained = on_wan(settings, module=module)
    assert {parameter.dtype for parameter in trained.parameters.values()} == {torch.float32}
    first = trainable_state(trained)

    def forward(module: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return wan_output(module)

    stepped(trained, forward, 2)
    assert all(torch.isfinite(parameter).all() for parameter in trained.parameters.values())
    assert all(not torch.equal(first[name], parameter) for name, parameter in trained.parameters.items())


@pytest.mark.parametrize("kind", ["locon", "loha", "lokr"])
def test_a_difference_below_the_resolution_of_bf16_has_an_effect(kind: str) -> None:
    """Added to a bf16 weight of 1, a difference below 0.0039 would be rounded away."""
    layer = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    settings = AdapterSettings(type=kind, rank=2, lokr_factor=2)  # type: ignore[arg-type]
    trained = attach(nn.Sequential(layer), settings, ["0"], seed=1, name="model")
    load_trainable_state(
        trained, {name: 0.01 * random_tensor(*tensor.shape) for name, tensor in trainable_state(trained).items()}
    )
    x = torch.tensor([1.0, -1.0] * 8, dtype=torch.bfloat16)  # sums to zero with equal weights
    difference = trained.module.get_submodule("0.lycoris").get_diff_weight()[0]  # type: ignore[operator]
    assert 0 < difference.abs().max() < 0.0039
    wanted = difference @ x.float()
    assert (trained.module(x).float() - wanted).abs().max() < 0.02 * wanted.abs().max()


@EVERY_KIND
def test_initial_values_do_not_depend_on_the_global_random_state(settings: AdapterSettings) -> None:
    first = trainable_state(on_wan(settings))
    torch.rand(17)
    before = torch.random.get_rng_state()
    second = trainable_state(on_wan(settings))
    assert torch.equal(before, torch.random.get_rng_state()), "the global random state stays"
    assert all(torch.equal(first[name], second[name]) for name in first)
    if settings.type != "diff":
        other = trainable_state(on_wan(settings, seed=2))
        assert any(not torch.equal(first[name], other[name]) for name in first)


@EVERY_KIND
def test_a_state_loaded_into_a_new_module_gives_the_same_output_to_the_bit(settings: AdapterSettings) -> None:
    trained = on_wan(settings)
    stepped(trained, steps=3)
    fresh = on_wan(settings, seed=9)
    load_trainable_state(fresh, trainable_state(trained))
    assert torch.equal(wan_output(fresh.module), wan_output(trained.module))


@EVERY_KIND
def test_temporary_weights_apply_an_average_and_restore_the_bits(settings: AdapterSettings) -> None:
    trained = on_wan(settings)
    first = trainable_state(trained)
    stepped(trained, steps=2)
    after, output = trainable_state(trained), wan_output(trained.module)
    with temporary_weights(trained, {name: (first[name] + after[name]) / 2 for name in first}):
        assert not torch.equal(wan_output(trained.module), output)
    assert torch.equal(wan_output(trained.module), output)
    assert all(torch.equal(after[name], parameter) for name, parameter in trained.parameters.items())


@EVERY_KIND
def test_gradient_checkpointing_gives_the_same_gradients(settings: AdapterSettings) -> None:
    plain, sparing = on_wan(settings), on_wan(settings)
    sparing.module.enable_gradient_checkpointing()  # type: ignore[operator]
    for trained in (plain, sparing):
        trained.module.train()
        wan_output(trained.module).square().mean().backward()
    for name, parameter in plain.parameters.items():
        assert parameter.grad is not None and torch.equal(parameter.grad, sparing.parameters[name].grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["lora", "locon", "loha", "lokr"])
def test_an_adapter_trains_on_an_8_bit_base(kind: str) -> None:
    module = wan()
    quantize_blocks(module, "int8", torch.device("cpu"))
    trained = on_wan(AdapterSettings(type=kind, rank=2), module=module)  # type: ignore[arg-type]
    first = trainable_state(trained)
    stepped(trained, steps=3)
    assert all(not torch.equal(first[name], parameter) for name, parameter in trained.parameters.items())


def test_diff_on_an_8_bit_base_raises_an_error() -> None:
    module = wan()
    quantize_blocks(module, "int8", torch.device("cpu"))
    with pytest.raises(ModelError, match=r'type is "diff", but .* are 8-bit .*; set model.base_weights: "as_computed"'):
        on_wan(AdapterSettings(type="diff"), module=module)


@pytest.mark.parametrize("kind", ["lora", "locon", "loha", "lokr"])
def test_dropout_acts_on_the_adapter_and_only_in_training_mode(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    trained = on_wan(AdapterSettings(type=kind, rank=4, dropout=0.5))  # type: ignore[arg-type]
    load_trainable_state(trained, {name: tensor + 0.1 for name, tensor in trainable_state(trained).items()})
    module = trained.module.eval()
    assert torch.equal(wan_output(module), wan_output(module))
    module.train()
    assert not torch.equal(wan_output(module), wan_output(module))
    assert capsys.readouterr() == ("", ""), "the libraries say nothing of their own"


# ── sizes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "kind, tensor", [("lora", "lora_A.weight"), ("locon", "lora_down.weight"), ("loha", "hada_w1_b")]
)
def test_each_layer_has_the_rank_of_the_first_matching_entry(kind: str, tensor: str) -> None:
    settings = AdapterSettings.model_validate(
        {
            "type": kind,
            "rank": 2,
            "modules": (
                {"match": "blocks.1.attn1.to_q", "rank": 8},
                {"match": "blocks.1.*", "rank": 6, "alpha": 3.0},
                {"match": "to_v", "rank": 5},
            ),
        }
    )
    trained = on_wan(settings)
    ranks = {name.removesuffix(f".{tensor}"): p.shape[0] for name, p in trained.parameters.items() if tensor in name}
    assert ranks["blocks.1.attn1.to_q"] == 8
    assert ranks["blocks.1.attn2.to_v"] == ranks["blocks.1.attn1.to_out.0"] == 6
    assert ranks["blocks.0.attn1.to_v"] == 5 and ranks["blocks.0.attn1.to_q"] == 2
    scales = {name: size.scale for name, size in trained.layers.items()}
    assert (
        scales["blocks.1.attn2.to_v"] == 0.5 and scales["blocks.1.attn1.to_q"] == 1.0 == scales["blocks.0.attn1.to_v"]
    )


@pytest.mark.parametrize("kind", ["lora", "locon", "loha", "lokr"])
@pytest.mark.parametrize("rslora, scale", [(False, 3 / 4), (True, 3 / 2)])
def test_the_adapters_output_is_scaled_by_alpha_over_the_rank_or_its_root(
    kind: str, rslora: bool, scale: float
) -> None:
    def added(alpha: float, rslora: bool) -> torch.Tensor:
        module = nn.Sequential(nn.Linear(36, 36, bias=False))
        nn.init.zeros_(module[0].weight)  # type: ignore[arg-type]
        settings = AdapterSettings(
            type=kind, rank=4 if kind != "lokr" else 2, alpha=alpha, rslora=rslora, lokr_factor=2
        )  # type: ignore[arg-type]
        trained = attach(module, settings, ["0"], seed=1, name="model")
        load_trainable_state(
            trained, {name: torch.ones_like(tensor) for name, tensor in trainable_state(trained).items()}
        )
        return module(torch.ones(1, 36))  # type: ignore[no-any-return]

    if kind == "lokr":
        scale = 3 / 2 if not rslora else 3 / 2**0.5
    wanted = added(4.0 if kind != "lokr" else 2.0, False) * scale
    assert torch.allclose(added(3.0, rslora), wanted, rtol=1e-6)


def test_an_entry_that_matches_no_layer_raises_an_error() -> None:
    settings = AdapterSettings.model_validate({"modules": ({"match": "ffn.net.2", "rank": 8},)})
    with pytest.raises(ModelError) as caught:
        on_wan(settings)
    assert "modules[0].match is 'ffn.net.2', which matches no adapted layer of high_noise" in str(caught.value)
    assert "these are blocks.0.attn1.to_q, blocks.0.attn1.to_k" in str(caught.value)


def test_an_expert_has_its_own_rank_alpha_and_targets() -> None:
    settings = AdapterSettings.model_validate(
        {"rank": 4, "high_noise": {"rank": 8, "targets": ("to_q",)}, "low_noise": {"alpha": 1.0}}
    )
    high, low, only = (settings_for_expert(settings, name) for name in ("high_noise", "low_noise", "model"))
    assert (high.rank, high.alpha, high.targets) == (8, None, ("to_q",))
    assert (low.rank, low.alpha, low.targets) == (4, 1.0, "attention")
    assert only == settings


def test_lokr_reports_layers_with_full_matrices() -> None:
    assert on_wan(AdapterSettings(type="lokr", rank=1)).note is None
    remark = on_wan(AdapterSettings(type="lokr", rank=64)).note
    assert remark is not None and "on 16 of 16 layers (blocks.0.attn1.to_q …)" in remark
