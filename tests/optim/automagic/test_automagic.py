"""Automagic against its reference implementation, in batches, in C, with bf16 weights, and resumed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from supertuner.config.settings.optim import OptimizerSettings
from supertuner.optim.automagic import parameter_batches
from supertuner.optim.automagic.native import find_native_library
from supertuner.optim.automagic.optimizer import Automagic
from supertuner.optim.automagic.rate_grid import LearningRateLimits
from supertuner.optim.optimizer_registry import ExpertOptimizer, automagic_limits
from supertuner.optim.optimizer_state import pack_state, restore_state
from tests.optim.automagic.reference_automagic import ReferenceAutomagic
from tests.optim.optimizer_builders import build_named_optimizer, build_weights, same_bits

LIMITS = LearningRateLimits(start=1e-6, bump=1e-6, lowest=1e-7, highest=1e-3)
EXACT = LearningRateLimits(start=2e-3, bump=1e-3, lowest=1e-3, highest=5e-3)
FAST = LearningRateLimits(start=1e-3, bump=1e-3, lowest=1e-4, highest=5e-3)


def random_gradients(parameters: dict[str, nn.Parameter], step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    gradients = {name: torch.randn(p.shape, generator=generator) for name, p in parameters.items() if name != "unused"}
    gradients["blocks.0.lora_B.weight"][:, 3] = 0.0
    return gradients


def set_gradients(parameters: dict[str, nn.Parameter], gradients: dict[str, torch.Tensor]) -> None:
    for name, p in parameters.items():
        p.grad = gradients[name].to(p.dtype) if name in gradients else None


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("native", [False, True], ids=["torch", "C"])
@pytest.mark.parametrize("stacked", [False, True], ids=["one by one", "stacked"])
def test_every_step_equals_the_reference_implementation(
    decay: float, native: bool, stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If start and limits are whole numbers of bumps apart, packing the rates loses nothing."""
    monkeypatch.setattr(parameter_batches, "CPU_ELEMENTS", 1 << 20 if stacked else 1)
    parameters = {f"{copy}.{name}": p for copy in range(3) for name, p in build_weights(copy).items()}
    reference = {name: p.detach().clone().contiguous() for name, p in parameters.items()}
    optimizer = Automagic(parameters, EXACT, weight_decay=decay, native=native)
    plain = ReferenceAutomagic(EXACT.bump, EXACT.lowest, EXACT.highest, EXACT.start, decay)
    for step in range(30):
        gradients = {
            f"{copy}.{name}": gradient
            for copy in range(3)
            for name, gradient in random_gradients(build_weights(), 99 * copy + step).items()
        }
        if step % 7 == 3:
            del gradients["1.blocks.0.bias"]  # sometimes a parameter has no gradient, and the batches change
        set_gradients(parameters, gradients)
        factor = 1.0 - step / 100
        optimizer.param_groups[0]["lr"] = EXACT.start * factor
        before = {name: p.detach().clone() for name, p in parameters.items()}
        reference = {name: p.clone(memory_format=torch.contiguous_format) for name, p in before.items()}
        optimizer.step()
        plain.step(reference, gradients, factor)
        for name, p in parameters.items():
            assert torch.allclose(p, reference[name], atol=1e-6, rtol=0), (name, step)


def test_the_first_update_uses_the_initial_rate_and_moves_no_rate() -> None:
    weight = nn.Parameter(torch.zeros(8, 16))
    optimizer = Automagic({"w": weight}, LearningRateLimits(1e-3, 1e-4, 1e-4, 1e-2))
    weight.grad = torch.ones(8, 16)
    optimizer.step()
    assert torch.allclose(weight, torch.full((8, 16), -1e-3))
    optimizer.step()
    assert torch.allclose(weight, torch.full((8, 16), -1e-3 - 1.1e-3))


def test_small_updates_of_bf16_weights_are_not_lost() -> None:
    """An update of 1/1000 of the distance to the next bf16 number changes the weight once in 1000 steps on average."""
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    rate = 1e-5
    optimizer = Automagic({"w": weight}, LearningRateLimits(rate, 1e-12, rate, rate))
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.dtype == torch.bfloat16
    assert float(1 - weight.detach().float().mean()) == pytest.approx(100 * rate, rel=0.1)


def test_rounding_of_bf16_weights_depends_only_on_seed_step_and_name() -> None:
    def trained(names: list[str], seed: int = 0) -> dict[str, torch.Tensor]:
        parameters = {name: nn.Parameter(torch.ones(40, 10, dtype=torch.bfloat16)) for name in names}
        optimizer = Automagic(parameters, LearningRateLimits(1e-4, 1e-6, 1e-7, 1e-3), seed=seed)
        for step in range(6):
            for p in parameters.values():
                p.grad = torch.randn(40, 10, generator=torch.Generator().manual_seed(step)).to(p.dtype)
            optimizer.step()
        return {name: p.detach() for name, p in parameters.items()}

    both, alone = trained(["a", "b"]), trained(["b"])
    assert same_bits({"b": both["b"]}, alone)
    assert not torch.equal(both["a"], both["b"])
    assert not torch.equal(trained(["b"], seed=1)["b"], alone["b"])


def test_the_state_takes_at_most_1_4_bytes_per_weight_beside_the_factored_moments() -> None:
    parameters = {"a": nn.Parameter(torch.zeros(16, 512)), "b": nn.Parameter(torch.zeros(1380, 16))}
    optimizer = Automagic(parameters, LIMITS)
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p in parameters.values():
        nbytes = {key: value.numel() * value.itemsize for key, value in optimizer.state[p].items()}
        moments = nbytes.pop("row") + nbytes.pop("column")
        assert moments == 4 * (p.shape[0] + p.shape[1])
        assert sum(nbytes.values()) <= 1.4 * p.numel()


def test_the_moments_of_a_kernel_have_one_row_per_output_channel() -> None:
    kernel = nn.Parameter(torch.zeros(8, 4, 3, 3))
    optimizer = Automagic({"k": kernel}, LIMITS)
    kernel.grad = torch.ones_like(kernel)
    optimizer.step()
    assert {key: value.numel() for key, value in optimizer.state[kernel].items() if key in ("row", "column")} == {
        "row": 8,
        "column": 36,
    }


def test_a_parameter_with_a_late_first_gradient_does_not_change_the_others() -> None:
    def trained(late: int) -> torch.Tensor:
        parameters = {name: nn.Parameter(torch.zeros(8, 24)) for name in ("a", "b")}
        optimizer = Automagic(parameters, FAST)
        for step in range(12):
            noise = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
            set_gradients(parameters, {"b": noise, **({"a": noise} if step >= late else {})})
            optimizer.step()
        return parameters["b"].detach()

    assert torch.equal(trained(0), trained(5))
    assert torch.equal(trained(0), trained(99))


@pytest.mark.skipif(find_native_library() is None, reason="the C extension was not built")
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_c_extension_stores_the_same_state_as_torch_and_gives_its_weights(decay: float) -> None:
    by_c, by_torch = build_weights(), build_weights()
    optimizer = Automagic(by_c, FAST, weight_decay=decay)
    torch_optimizer = Automagic(by_torch, FAST, weight_decay=decay, native=False)
    for step in range(25):
        set_gradients(by_c, random_gradients(by_c, step))
        set_gradients(by_torch, random_gradients(by_torch, step))
        for name, p in by_c.items():
            by_torch[name].data.copy_(p.data)
        optimizer.step()
        torch_optimizer.step()
        for name, p in by_c.items():
            assert torch.allclose(p, by_torch[name], atol=1e-6, rtol=0), (name, step)
    for name, p in by_c.items():
        state, other = optimizer.state.get(p, {}), torch_optimizer.state.get(by_torch[name], {})
        assert state.keys() == other.keys()
        for key in state:
            assert torch.allclose(state[key].float(), other[key].float(), rtol=1e-5, atol=0), (name, key)
            if state[key].dtype == torch.uint8:
                count = p.numel() if key == "low" else -1  # the padding is never read
                assert torch.equal(state[key][:count], other[key][:count]), (name, key)


@pytest.mark.skipif(find_native_library() is None, reason="the C extension was not built")
def test_the_c_extension_gives_the_same_bits_on_any_number_of_threads() -> None:
    def trained(threads: int) -> dict[str, torch.Tensor]:
        parameters = {str(number): nn.Parameter(torch.ones(16, 40 + number)) for number in range(12)}
        optimizer = Automagic(parameters, FAST)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for step in range(5):
                noise = torch.Generator().manual_seed(step)
                set_gradients(
                    parameters, {name: torch.randn(p.shape, generator=noise) for name, p in parameters.items()}
                )
                optimizer.step()
        finally:
            torch.set_num_threads(before)
        return {name: p.detach() for name, p in parameters.items()}

    assert same_bits(trained(1), trained(3))


def test_a_step_reads_no_value_from_the_device() -> None:
    """Reading a value of a meta tensor would raise."""
    parameters = {name: nn.Parameter(p.detach().to("meta")) for name, p in build_weights().items()}
    optimizer = Automagic(parameters, FAST, weight_decay=0.1)
    for _ in range(3):
        for p in parameters.values():
            p.grad = torch.empty_like(p)
        optimizer.step()
    assert optimizer.state[parameters["scale"]]["low"].device.type == "meta"


def test_a_step_does_not_change_the_gradients() -> None:
    for native in (True, False):
        parameters = build_weights()
        optimizer, gradients = (
            Automagic(parameters, FAST, weight_decay=0.1, native=native),
            random_gradients(parameters, 0),
        )
        set_gradients(parameters, {name: gradient.clone() for name, gradient in gradients.items()})
        optimizer.step()
        assert same_bits({name: p.grad for name, p in parameters.items() if p.grad is not None}, gradients)


@pytest.mark.parametrize("changed", [{"lr_bump": 5e-7}, {"min_lr": 5e-7, "max_lr": 2e-3}, {"max_lr": 1e-5}])
def test_a_resumed_run_with_other_limits_keeps_the_rates(changed: dict[str, float]) -> None:
    first = build_named_optimizer("automagic", {"w": nn.Parameter(torch.zeros(16, 32))})
    for step in range(60):
        first.parameters["w"].grad = torch.ones(16, 32)
        first.parameters["w"].grad[:, ::2] = 1.0 if step % 3 else -1.0
        first.step()
    second = build_named_optimizer("automagic", {"w": nn.Parameter(torch.zeros(16, 32))}, **changed)
    restore_state(second, *pack_state(first))
    second.parameters["w"].grad = torch.zeros(16, 32)  # no rate moves
    second.step()
    before, after = first.learning_rate_spread(), second.learning_rate_spread()
    assert before is not None and after is not None
    assert before.highest == pytest.approx(60e-6, rel=0.01)
    limits = automagic_limits(OptimizerSettings.model_validate({"name": "automagic", **changed}), "model")
    for one, other in zip(before.figures().values(), after.figures().values(), strict=True):
        if limits.highest > 60e-6:
            assert other == pytest.approx(max(one, limits.lowest), abs=limits.bump)
        else:
            assert other <= limits.highest * 1.0001


def test_rates_of_a_checkpoint_of_version_01_are_kept() -> None:
    """Version 0.1 stored `lowest + code · unit`, and saved these two numbers. With the defaults, the rounded bump."""
    lowest, unit = 1e-7, (1e-3 - 1e-7) / 1000
    codes = torch.tensor([0, 1, 2, 5, 30, 100, 400, 1000] * 4)
    tensors, meta = pack_state(one_step("automagic", codes.numel()))
    tensors["w/low"] = (codes % 256).to(torch.uint8)
    planes = (codes // 256).view(4, -1) << torch.tensor([[0], [2], [4], [6]])
    tensors["w/high"] = planes.sum(0).to(torch.uint8)
    meta["group"] = {"updates": 1, "lowest": lowest, "unit": unit}
    second = build_named_optimizer("automagic", {"w": nn.Parameter(torch.zeros(1, codes.numel()))})
    restore_state(second, tensors, meta)
    second.parameters["w"].grad = torch.zeros(1, codes.numel())  # no rate moves
    second.step()
    spread = second.learning_rate_spread()
    assert spread is not None
    assert (spread.lowest, spread.highest) == (pytest.approx(1e-7), pytest.approx(1e-3))
    assert spread.mean == pytest.approx(float((codes * unit + lowest).mean()), rel=0.001)
    again = build_named_optimizer("automagic", {"w": nn.Parameter(torch.zeros(1, codes.numel()))})
    restore_state(again, *pack_state(second))
    assert again.learning_rate_spread() == spread, "converted once"


def one_step(name: str, count: int) -> ExpertOptimizer:
    optimizer = build_named_optimizer(name, {"w": nn.Parameter(torch.zeros(1, count))})
    optimizer.parameters["w"].grad = torch.ones(1, count)
    optimizer.step()
    return optimizer
