"""Sample weights, masks and prior preservation: their effect on losses and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import pytest
import torch

from supertuner.config.settings.model import AdapterSettings
from supertuner.models.adapters.attach import attach, temporary_weights
from supertuner.models.families.wan22 import family as wan22
from supertuner.models.objective.diffusion import sample_noise
from supertuner.models.spec import ModelSource
from supertuner.step.batch import StepBatch
from supertuner.step.train_step import ExpertState, sample_losses
from tests.models.families.pipelines import tiny_wan
from tests.step.step_builders import (
    EXPERT,
    build_batch,
    build_expert_state,
    build_wan_batch,
    tiny_expert_state,
    tiny_step_options,
    wan_step_options,
)

__all__ = ["tiny_wan"]


def with_loss_inputs(batch: StepBatch, **loss_inputs: torch.Tensor) -> StepBatch:
    return replace(batch, loss_inputs=loss_inputs)


def gradients(state: ExpertState, batch: StepBatch) -> list[torch.Tensor]:
    losses = sample_losses(state, batch, tiny_step_options())
    return list(torch.autograd.grad(losses.sum(), list(state.parameters.values())))


def test_weight_three_counts_like_three_samples_and_weight_zero_like_none() -> None:
    state = tiny_expert_state()
    weighted = gradients(state, with_loss_inputs(build_batch([4, 5], 3), weight=torch.tensor([3.0, 0.0])))
    for actual, expected in zip(weighted, gradients(state, build_batch([4, 4, 4], 3)), strict=True):
        torch.testing.assert_close(actual, expected)


def test_masked_positions_do_not_change_the_loss() -> None:
    """The targets of the two batches differ only in the masked last row."""
    state, batch = tiny_expert_state(), build_batch([4], 3)
    mask = torch.ones(1, 1, *batch.latents.shape[2:])
    mask[..., -1, :] = 0
    other = replace(batch, latents=batch.latents.clone(), noise=batch.noise.clone(), sigmas=torch.zeros(1))
    batch = replace(batch, sigmas=torch.zeros(1))  # at sigma 0 the model sees no noise: only the targets differ
    other.noise[..., -1, :] += 100
    seen = [sample_losses(state, with_loss_inputs(each, mask=mask), tiny_step_options()) for each in (batch, other)]
    bare = [sample_losses(state, each, tiny_step_options()) for each in (batch, other)]
    assert torch.equal(*seen) and not torch.equal(*bare)


def test_loss_inputs_are_transformed_with_their_batch() -> None:
    batch = with_loss_inputs(build_batch([1, 2], 3), weight=torch.tensor([1.0, 2.0]))
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


def expert_with_prior(source: ModelSource, kind: str = "lora") -> tuple[ExpertState, Mapping[str, torch.Tensor]]:
    """A Wan expert with a trained adapter that can compute with its initial values, and those values."""
    model = wan22.read_model(source)
    module = wan22.FAMILY.load_denoiser(model, model.experts[-1], torch.float32)
    settings = AdapterSettings.model_validate({"rank": 2} | KINDS[kind])
    trained = attach(module, settings, ("to_q", "to_v"), seed=1, name=EXPERT.name)
    initial_values = {name: parameter.detach().clone() for name, parameter in trained.parameters.items()}
    untrained: partial[AbstractContextManager[None]] = partial(temporary_weights, trained, initial_values)
    for place, parameter in enumerate(trained.parameters.values()):
        parameter.data += 0.3 * sample_noise(7, place, parameter.shape)
    state = build_expert_state(module, dict(trained.parameters))
    state.base_weights = untrained
    return state, initial_values


@pytest.mark.filterwarnings("ignore::UserWarning")  # LoKr warns that layers this small get full matrices
@pytest.mark.parametrize("kind", KINDS)
def test_the_prior_target_is_the_untrained_models_prediction_and_only_of_flagged_samples(
    tiny_wan: ModelSource, kind: str
) -> None:
    state, initial_values = expert_with_prior(tiny_wan, kind)
    options, batch = wan_step_options(tiny_wan, "fp32"), build_wan_batch([1, 2], 4)
    before = {name: parameter.detach().clone() for name, parameter in state.parameters.items()}
    plain = sample_losses(state, batch, options).detach()
    mixed = sample_losses(state, with_loss_inputs(batch, prior=torch.tensor([True, False])), options).detach()
    assert mixed[0] > 0 and not torch.equal(mixed[0], plain[0]) and torch.equal(mixed[1], plain[1])
    for name, parameter in state.parameters.items():
        assert torch.equal(parameter, before[name])
    for name, parameter in state.parameters.items():
        parameter.data = initial_values[name].clone()
    same = sample_losses(state, with_loss_inputs(batch, prior=torch.tensor([True, True])), options)
    assert same.tolist() == pytest.approx([0.0, 0.0], abs=1e-10)


def test_training_on_the_prior_alone_leads_back_to_the_untrained_model(tiny_wan: ModelSource) -> None:
    state, _ = expert_with_prior(tiny_wan)
    options, batch = (
        wan_step_options(tiny_wan, "fp32"),
        with_loss_inputs(build_wan_batch([1, 2], 4), prior=torch.tensor([True, True])),
    )
    first = sample_losses(state, batch, options).sum().item()
    parameters = list(state.parameters.values())
    optimizer = torch.optim.Adam(parameters, 0.02)
    for _ in range(40):
        optimizer.zero_grad()
        sample_losses(state, batch, options).sum().backward()
        optimizer.step()
    assert sample_losses(state, batch, options).sum().item() < first / 10
