"""Weights, masks and the prior in a window: they change the gradient as they say, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import pytest
import torch

from supertuner.config.settings.model import AdapterSettings
from supertuner.models.adapters.attach import attach, temporary_weights
from supertuner.models.objective.diffusion import sample_noise
from supertuner.models.spec import ModelSource
from supertuner.step.batch import StepBatch
from supertuner.step.window import ExpertState, sample_losses
from tests.models.families.pipelines import tiny_wan
from tests.step.making import (
    EXPERT,
    build_batch,
    build_expert_state,
    build_wan_batch,
    tiny_expert_state,
    tiny_step_options,
    wan22,
    wan_step_options,
)

__all__ = ["tiny_wan"]


def counted(batch: StepBatch, **counts: torch.Tensor) -> StepBatch:
    return replace(batch, counts=counts)


def gradients(one: ExpertState, batch: StepBatch) -> list[torch.Tensor]:
    losses = sample_losses(one, batch, tiny_step_options())
    return list(torch.autograd.grad(losses.sum(), list(one.parameters.values())))


def test_a_sample_of_weight_three_pulls_as_three_do_and_one_of_weight_zero_not_at_all() -> None:
    one = tiny_expert_state()
    weighted = gradients(one, counted(build_batch([4, 5], 3), weight=torch.tensor([3.0, 0.0])))
    for found, wanted in zip(weighted, gradients(one, build_batch([4, 4, 4], 3)), strict=True):
        torch.testing.assert_close(found, wanted)


def test_what_the_mask_hides_changes_nothing() -> None:
    """Errors there can be any: the noise, and with it what is wanted, is another in the last row."""
    one, batch = tiny_expert_state(), build_batch([4], 3)
    mask = torch.ones(1, 1, *batch.latents.shape[2:])
    mask[..., -1, :] = 0
    other = replace(batch, latents=batch.latents.clone(), noise=batch.noise.clone(), levels=torch.zeros(1))
    batch = replace(batch, levels=torch.zeros(1))  # at level 0 the model sees no noise: only what is wanted differs
    other.noise[..., -1, :] += 100
    seen = [sample_losses(one, counted(each, mask=mask), tiny_step_options()) for each in (batch, other)]
    bare = [sample_losses(one, each, tiny_step_options()) for each in (batch, other)]
    assert torch.equal(*seen) and not torch.equal(*bare)


def test_counts_travel_with_their_batch() -> None:
    batch = counted(build_batch([1, 2], 3), weight=torch.tensor([1.0, 2.0]))
    assert batch.map_tensors(lambda tensor: tensor + 1).loss_inputs["weight"].tolist() == [2.0, 3.0]
    assert torch.equal(batch.named_tensors()["counts.weight"], batch.loss_inputs["weight"])
    assert len(list(batch.tensors())) == len(batch.named_tensors())


KINDS: dict[str, dict[str, object]] = {
    "lora": {},
    "dora": {"dora": True},
    "lokr": {"type": "lokr"},
    "diff": {"type": "diff"},
    "full": {"type": "full"},
}


def with_prior(source: ModelSource, kind: str = "lora") -> tuple[ExpertState, Mapping[str, torch.Tensor]]:
    """A Wan expert with a trained adapter that knows how it began."""
    model = wan22.read_model(source)
    module = wan22.FAMILY.load_denoiser(model, model.experts[-1], torch.float32)
    settings = AdapterSettings.model_validate({"rank": 2} | KINDS[kind])
    trained = attach(module, settings, ("to_q", "to_v"), seed=1, name=EXPERT.name)
    begun = {name: parameter.detach().clone() for name, parameter in trained.parameters.items()}
    untrained: partial[AbstractContextManager[None]] = partial(temporary_weights, trained, begun)
    for place, parameter in enumerate(trained.parameters.values()):
        parameter.data += 0.3 * sample_noise(7, place, parameter.shape)
    one = build_expert_state(module, dict(trained.parameters))
    one.base_weights = untrained
    return one, begun


@pytest.mark.filterwarnings("ignore::UserWarning")  # LoKr says that such small layers get whole factors
@pytest.mark.parametrize("kind", KINDS)
def test_the_prior_is_what_the_untrained_model_says_and_only_of_samples_that_keep_it(
    tiny_wan: ModelSource, kind: str
) -> None:
    one, begun = with_prior(tiny_wan, kind)
    rules, batch = wan_step_options(tiny_wan, "fp32"), build_wan_batch([1, 2], 4)
    kept = {name: parameter.detach().clone() for name, parameter in one.parameters.items()}
    plain = sample_losses(one, batch, rules).detach()
    mixed = sample_losses(one, counted(batch, prior=torch.tensor([True, False])), rules).detach()
    assert mixed[0] > 0 and not torch.equal(mixed[0], plain[0]) and torch.equal(mixed[1], plain[1])
    for name, parameter in one.parameters.items():
        assert torch.equal(parameter, kept[name])
    for name, parameter in one.parameters.items():
        parameter.data = begun[name].clone()
    same = sample_losses(one, counted(batch, prior=torch.tensor([True, True])), rules)
    assert same.tolist() == pytest.approx([0.0, 0.0], abs=1e-10)


def test_training_on_the_prior_alone_leads_back_to_the_untrained_model(tiny_wan: ModelSource) -> None:
    one, _ = with_prior(tiny_wan)
    rules, batch = (
        wan_step_options(tiny_wan, "fp32"),
        counted(build_wan_batch([1, 2], 4), prior=torch.tensor([True, True])),
    )
    first = sample_losses(one, batch, rules).sum().item()
    parameters = list(one.parameters.values())
    optimizer = torch.optim.Adam(parameters, 0.02)
    for _ in range(40):
        optimizer.zero_grad()
        sample_losses(one, batch, rules).sum().backward()
        optimizer.step()
    assert sample_losses(one, batch, rules).sum().item() < first / 10
