"""Stateless random numbers: they depend on seed, step, name, purpose and element only, and are uniform in each."""

from __future__ import annotations

import pytest
import torch

from supertuner.optim.automagic.stochastic_bits import StochasticBits, name_keys, stochastic_round_to_bf16

CPU = torch.device("cpu")
COUNT = 4096


def drawn(names: list[str], seed: int = 0, step: int = 0, purpose: int = 1, count: int = COUNT) -> torch.Tensor:
    return StochasticBits(seed, step).draw(name_keys(names, CPU), count, purpose)


def test_numbers_depend_on_seed_step_name_purpose_and_on_nothing_else() -> None:
    assert torch.equal(drawn(["a", "b"])[1], drawn(["b"])[0])
    assert torch.equal(drawn(["a", "b", "c"], step=7)[2], drawn(["c"], step=7)[0])
    first = drawn(["a"])
    for other in (drawn(["b"]), drawn(["a"], seed=1), drawn(["a"], step=1), drawn(["a"], purpose=2)):
        assert not torch.equal(first, other)


@pytest.mark.parametrize("across", ["elements", "names", "steps"])
def test_numbers_are_uniform(across: str) -> None:
    numbers = {
        "elements": lambda: drawn(["a"])[0],
        "names": lambda: drawn([str(number) for number in range(COUNT)], count=8)[:, 3],
        "steps": lambda: torch.cat([drawn(["a"], step=step, count=8)[0, :1] for step in range(COUNT)]),
    }[across]()
    shares = torch.histc(numbers.float(), 16, min=-32768, max=32767) / COUNT
    assert torch.allclose(shares, torch.full((16,), 1 / 16), atol=0.016)  # four standard deviations


def test_numbers_of_neighbouring_steps_and_names_are_uncorrelated() -> None:
    pairs = torch.stack([drawn(["a", "b"], step=step, count=8)[:, 0].float() for step in range(COUNT)])
    assert abs(float(torch.corrcoef(pairs.t())[0, 1])) < 0.06
    assert abs(float(torch.corrcoef(torch.stack([pairs[1:, 0], pairs[:-1, 0]]))[0, 1])) < 0.06


def test_stochastic_rounding_gives_a_neighbour_and_is_unbiased() -> None:
    values = torch.tensor([1.0, 1.001, -3.14159, 1e-8, 0.0]).repeat_interleave(COUNT).view(5, COUNT)
    rounded = stochastic_round_to_bf16(values.contiguous(), drawn([str(number) for number in range(5)])).float()
    nearest = values.bfloat16().float()
    assert bool(((rounded - values).abs() <= 2 ** (torch.floor(torch.log2(values.abs() + 1e-30)) - 7)).all())
    assert torch.equal(rounded[0], nearest[0]) and torch.equal(rounded[4], nearest[4]), (
        "values that bf16 represents exactly do not change"
    )
    assert torch.allclose(rounded.double().mean(1), values.double().mean(1), rtol=2e-4, atol=0)
