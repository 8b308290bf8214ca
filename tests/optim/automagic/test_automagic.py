"""Automagic: the algorithm as it is written down, whatever batches it is computed in; and weights in bf16."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from supertuner.config.settings.optim import OptimizerSettings
from supertuner.optim.automagic import parameter_batches as automagic_batch
from supertuner.optim.automagic.native import find_native_library
from supertuner.optim.automagic.optimizer import Automagic
from supertuner.optim.automagic.packed_rates import LearningRateLimits
from supertuner.optim.optimizer_registry import automagic_limits
from supertuner.optim.optimizer_state import pack_state, restore_state
from tests.optim.automagic.plain_automagic import ReferenceAutomagic
from tests.optim.training import build_named_optimizer, build_weights, same_bits

LIMITS = LearningRateLimits(start=1e-6, bump=1e-6, lowest=1e-7, highest=1e-3)
FAST = LearningRateLimits(start=1e-3, bump=1e-3, lowest=1e-4, highest=5e-3)


def gradients(parameters: dict[str, nn.Parameter], step: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    found = {name: torch.randn(p.shape, generator=made) for name, p in parameters.items() if name != "unused"}
    found["blocks.0.lora_B.weight"][:, 3] = 0.0
    return found


def give(parameters: dict[str, nn.Parameter], found: dict[str, torch.Tensor]) -> None:
    for name, p in parameters.items():
        p.grad = found[name].to(p.dtype) if name in found else None


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "stacked"])
def test_with_rates_in_fp32_every_step_is_that_of_the_plain_form(
    decay: float, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automagic_batch, "CPU_ELEMENTS", 1 << 20 if together else 1)
    parameters = {f"{copy}.{name}": p for copy in range(3) for name, p in build_weights(copy).items()}
    reference = {name: p.detach().clone().contiguous() for name, p in parameters.items()}
    ours = Automagic(parameters, FAST, weight_decay=decay, rate_storage="fp32")
    plain = ReferenceAutomagic(FAST.bump, FAST.lowest, FAST.highest, FAST.start, decay)
    for step in range(30):
        found = {
            f"{copy}.{name}": one
            for copy in range(3)
            for name, one in gradients(build_weights(), 99 * copy + step).items()
        }
        if step % 7 == 3:
            del found["1.blocks.0.bias"]  # now and then one has no gradient: batches are others then
        give(parameters, found)
        factor = 1.0 - step / 100
        ours.param_groups[0]["lr"] = FAST.start * factor
        before = {name: p.detach().clone() for name, p in parameters.items()}
        reference = {name: p.clone(memory_format=torch.contiguous_format) for name, p in before.items()}
        ours.step()
        plain.step(reference, found, factor)
        for name, p in parameters.items():
            assert torch.allclose(p, reference[name], atol=1e-6, rtol=0), (name, step)


def test_packed_rates_give_the_weights_of_rates_in_fp32() -> None:
    """Where the range is a whole number of bumps from the start on, nothing at all is lost."""
    limits = LearningRateLimits(start=2e-3, bump=1e-3, lowest=1e-3, highest=0.5)
    packed, plain = build_weights(), build_weights()
    a, b = Automagic(packed, limits), Automagic(plain, limits, rate_storage="fp32")
    for step in range(40):
        give(packed, gradients(packed, step))
        give(plain, gradients(plain, step))
        a.step()
        b.step()
    for name, p in packed.items():
        assert torch.allclose(p, plain[name], atol=1e-5, rtol=0), name


def test_a_first_update_moves_no_rate_and_has_its_size() -> None:
    weight = nn.Parameter(torch.zeros(8, 16))
    ours = Automagic({"w": weight}, LearningRateLimits(1e-3, 1e-4, 1e-5, 1e-2), rate_storage="fp32")
    weight.grad = torch.ones(8, 16)
    ours.step()
    assert torch.allclose(weight, torch.full((8, 16), -1e-3))
    ours.step()
    assert torch.allclose(weight, torch.full((8, 16), -1e-3 - 1.1e-3))


def test_small_updates_of_bf16_weights_are_not_lost() -> None:
    """A step of 1e-3 of the distance to the next bf16 is taken once in a thousand times."""
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    rate = 1e-5
    ours = Automagic({"w": weight}, LearningRateLimits(rate, 1e-12, rate, rate))
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        ours.step()
    assert weight.dtype == torch.bfloat16
    assert float(1 - weight.detach().float().mean()) == pytest.approx(100 * rate, rel=0.1)


def test_bf16_weights_are_rounded_by_seed_step_and_name_alone() -> None:
    def trained(names: list[str], seed: int = 0) -> dict[str, torch.Tensor]:
        made = {name: nn.Parameter(torch.ones(40, 10, dtype=torch.bfloat16)) for name in names}
        ours = Automagic(made, LearningRateLimits(1e-4, 1e-6, 1e-7, 1e-3), seed=seed)
        for step in range(6):
            for p in made.values():
                p.grad = torch.randn(40, 10, generator=torch.Generator().manual_seed(step)).to(p.dtype)
            ours.step()
        return {name: p.detach() for name, p in made.items()}

    both, alone = trained(["a", "b"]), trained(["b"])
    assert same_bits({"b": both["b"]}, alone)
    assert not torch.equal(both["a"], both["b"])
    assert not torch.equal(trained(["b"], seed=1)["b"], alone["b"])


def test_state_of_a_lora_takes_less_than_one_point_four_bytes_a_weight_and_its_factored_moments() -> None:
    parameters = {"a": nn.Parameter(torch.zeros(16, 512)), "b": nn.Parameter(torch.zeros(1380, 16))}
    ours = Automagic(parameters, LIMITS)
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    ours.step()
    for p in parameters.values():
        kept = {key: value.numel() * value.itemsize for key, value in ours.state[p].items()}
        moments = kept.pop("row") + kept.pop("column")
        assert moments == 4 * (p.shape[0] + p.shape[1])
        assert sum(kept.values()) <= 1.4 * p.numel()


def test_the_moments_of_a_kernel_are_those_of_its_matrix() -> None:
    kernel = nn.Parameter(torch.zeros(8, 4, 3, 3))
    ours = Automagic({"k": kernel}, LIMITS)
    kernel.grad = torch.ones_like(kernel)
    ours.step()
    assert {key: value.numel() for key, value in ours.state[kernel].items() if key in ("row", "column")} == {
        "row": 8,
        "column": 36,
    }


def test_a_parameter_that_joins_later_changes_nothing_for_the_others() -> None:
    def trained(late: int) -> torch.Tensor:
        made = {name: nn.Parameter(torch.zeros(8, 24)) for name in ("a", "b")}
        ours = Automagic(made, FAST)
        for step in range(12):
            noise = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
            give(made, {"b": noise, **({"a": noise} if step >= late else {})})
            ours.step()
        return made["b"].detach()

    assert torch.equal(trained(0), trained(5))
    assert torch.equal(trained(0), trained(99))


@pytest.mark.skipif(find_native_library() is None, reason="the C part was not built")
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_c_part_stores_what_torch_would_store_and_gives_its_weights(decay: float) -> None:
    by_c, by_torch = build_weights(), build_weights()
    ours = Automagic(by_c, FAST, weight_decay=decay)
    torchs = Automagic(by_torch, FAST, weight_decay=decay, native=False)
    for step in range(25):
        give(by_c, gradients(by_c, step))
        give(by_torch, gradients(by_torch, step))
        for name, p in by_c.items():
            by_torch[name].data.copy_(p.data)
        ours.step()
        torchs.step()
        for name, p in by_c.items():
            assert torch.allclose(p, by_torch[name], atol=1e-6, rtol=0), (name, step)
    for name, p in by_c.items():
        state, other = ours.state.get(p, {}), torchs.state.get(by_torch[name], {})
        assert state.keys() == other.keys()
        for key in state:
            assert torch.allclose(state[key].float(), other[key].float(), rtol=1e-5, atol=0), (name, key)
            if state[key].dtype == torch.uint8:
                count = p.numel() if key == "low" else -1  # beyond the last element nobody reads
                assert torch.equal(state[key][:count], other[key][:count]), (name, key)


@pytest.mark.skipif(find_native_library() is None, reason="the C part was not built")
def test_several_threads_of_the_c_part_give_the_bits_of_one() -> None:
    def trained(threads: int) -> dict[str, torch.Tensor]:
        made = {str(number): nn.Parameter(torch.ones(16, 40 + number)) for number in range(12)}
        ours = Automagic(made, FAST)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for step in range(5):
                noise = torch.Generator().manual_seed(step)
                give(made, {name: torch.randn(p.shape, generator=noise) for name, p in made.items()})
                ours.step()
        finally:
            torch.set_num_threads(before)
        return {name: p.detach() for name, p in made.items()}

    assert same_bits(trained(1), trained(3))


def test_a_step_reads_no_number_from_the_device() -> None:
    """Tensors without memory have none to read: asking for one would raise."""
    parameters = {name: nn.Parameter(p.detach().to("meta")) for name, p in build_weights().items()}
    ours = Automagic(parameters, FAST, weight_decay=0.1)
    for _ in range(3):
        for p in parameters.values():
            p.grad = torch.empty_like(p)
        ours.step()
    assert ours.state[parameters["scale"]]["low"].device.type == "meta"


def test_gradients_come_out_of_a_step_as_they_went_in() -> None:
    for native in (True, False):
        parameters = build_weights()
        ours, found = Automagic(parameters, FAST, weight_decay=0.1, native=native), gradients(parameters, 0)
        give(parameters, {name: one.clone() for name, one in found.items()})
        ours.step()
        assert same_bits({name: p.grad for name, p in parameters.items() if p.grad is not None}, found)


@pytest.mark.parametrize("changed", [{"lr_bump": 5e-7}, {"min_lr": 5e-7, "max_lr": 2e-3}, {"max_lr": 1e-5}])
def test_rates_are_carried_over_where_a_resumed_run_has_other_limits(changed: dict[str, float]) -> None:
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
