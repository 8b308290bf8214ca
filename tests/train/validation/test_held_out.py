"""The held-out loss: fixed noise levels and noise, the same bits each time, and the right value."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from supertuner.core.events import DecisionEvent
from supertuner.models.objective.diffusion import sample_noise
from supertuner.models.spec import Expert, ModelSource
from supertuner.sinks.training_events import HeldOutLoss
from supertuner.step.batch import StepBatch
from supertuner.train.validation.held_out_loss import (
    append_means,
    encode_row,
    measure_held_out,
    plan_sigmas,
    sigma_noise_seed,
    with_sigma,
)
from tests.step.step_builders import build_wan_batch
from tests.train.validation.making import RecordingSink, training

HIGH, LOW = Expert("high_noise", "transformer", sigma_min=0.875), Expert("low_noise", "transformer_2", sigma_max=0.875)


def probes(cut: Sequence[Sequence[int]], side: int = 4) -> list[StepBatch]:
    return [build_wan_batch(positions, side) for positions in cut]


def test_an_expert_is_measured_at_the_noise_levels_in_its_range() -> None:
    sink = RecordingSink()
    assert plan_sigmas([HIGH, LOW], (0.1, 0.5, 0.875, 0.9), sink) == {
        "high_noise": (0.875, 0.9),
        "low_noise": (0.1, 0.5),
    }
    assert sink.events == []


def test_an_expert_without_a_noise_level_is_measured_in_the_middle_of_its_range_with_a_report() -> None:
    sink = RecordingSink()
    assert plan_sigmas([HIGH], (0.1, 0.5), sink) == {"high_noise": (0.9375,)}
    [event] = sink.events
    assert isinstance(event, DecisionEvent) and event.what == "validation.held_out_levels[high_noise]"


def test_noise_is_a_function_of_seed_sample_and_noise_level_alone() -> None:
    [probe] = probes([[3, 8]])
    one = with_sigma(probe, 0.5, seed=1)
    torch.manual_seed(123)
    again = with_sigma(build_wan_batch([8, 3], 4), 0.5, seed=1)
    assert torch.equal(one.noise[0], again.noise[1]) and torch.equal(one.noise[1], again.noise[0])
    assert one.sigmas.tolist() == [0.5, 0.5] and one.sigmas.dtype == one.noise.dtype == torch.float32
    for other in (with_sigma(probe, 0.3, seed=1), with_sigma(probe, 0.5, seed=2)):
        assert not torch.equal(one.noise, other.noise)
    training_noise = sample_noise(1, 3, tuple(probe.latents.shape[1:]))
    assert not torch.equal(one.noise[0], training_noise)
    assert sigma_noise_seed(1, 0.5) != sigma_noise_seed(1, 0.3)


def test_the_loss_is_the_mean_square_error_of_the_velocity(tiny_wan: ModelSource) -> None:
    run = training(tiny_wan, dropout=0.0)
    expert_state = run.expert_states[1]
    [probe] = probes([[0, 1]])
    [row] = measure_held_out(expert_state, [probe], (0.5,), seed=4, step_options=run.step_options)
    batch = with_sigma(probe, 0.5, 4)
    with torch.no_grad():
        noisy = 0.5 * batch.latents + 0.5 * batch.noise
        predicted = run.step_options.denoise(expert_state.module, noisy, batch.sigmas, dict(batch.text), {})
    wanted = (predicted - (batch.noise - batch.latents)).square().mean().item()
    assert (row.expert, row.sigma) == ("low_noise", 0.5)
    assert math.isclose(row.loss, wanted, rel_tol=1e-6)


def test_two_measurements_of_the_same_weights_agree_to_the_bit_and_training_lowers_the_loss(
    tiny_wan: ModelSource,
) -> None:
    run = training(tiny_wan)
    expert_state, given = run.expert_states[1], probes([[0, 1, 2], [3]])
    before = measure_held_out(expert_state, given, (0.1, 0.5, 0.8), seed=4, step_options=run.step_options)
    torch.rand(100)
    assert measure_held_out(expert_state, given, (0.1, 0.5, 0.8), seed=4, step_options=run.step_options) == before
    for number in range(30):
        run.window(2 * number + 1)
    after = measure_held_out(expert_state, given, (0.1, 0.5, 0.8), seed=4, step_options=run.step_options)
    assert append_means(after)[-1].loss < append_means(before)[-1].loss


def test_how_samples_are_batched_hardly_matters(tiny_wan: ModelSource) -> None:
    run = training(tiny_wan)
    expert_state = run.expert_states[0]
    one = measure_held_out(expert_state, probes([[0, 1, 2, 3]]), (0.9,), seed=4, step_options=run.step_options)
    other = measure_held_out(expert_state, probes([[2], [0, 3], [1]]), (0.9,), seed=4, step_options=run.step_options)
    assert math.isclose(one[0].loss, other[0].loss, rel_tol=1e-5)


def test_measuring_leaves_a_module_in_training_unchanged(tiny_wan: ModelSource) -> None:
    run = training(tiny_wan)
    expert_state = run.expert_states[0]
    run.window(0)
    gradients = [p.grad for p in expert_state.parameters.values()]
    state, modes = torch.get_rng_state(), [part.training for part in expert_state.module.modules()]
    measure_held_out(expert_state, probes([[0, 1]]), (0.9,), seed=4, step_options=run.step_options)
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in expert_state.module.modules()] == modes and any(modes)
    assert all(p.grad is then for p, then in zip(expert_state.parameters.values(), gradients, strict=True))


def test_means_are_of_levels_by_expert_and_of_everything() -> None:
    rows = [
        HeldOutLoss("high_noise", 0.9, 0.25),
        HeldOutLoss("low_noise", 0.1, 0.5),
        HeldOutLoss("low_noise", 0.5, 1.0),
    ]
    assert append_means(rows) == [
        rows[0],
        HeldOutLoss("high_noise", None, 0.25),
        *rows[1:],
        HeldOutLoss("low_noise", None, 0.75),
        HeldOutLoss(None, None, 1.75 / 3),
    ]
    assert append_means([]) == []


def test_a_line_is_read_back_exactly_with_none_for_nan() -> None:
    loss = 0.1 + 0.2
    line = encode_row(40, HeldOutLoss("model", 0.1, loss))
    assert line == b'{"step": 40, "expert": "model", "level": 0.1, "loss": 0.30000000000000004}\n'
    assert json.loads(line)["loss"] == loss
    assert json.loads(encode_row(40, HeldOutLoss("model", 0.1, math.nan)))["loss"] is None


def test_a_batch_keeps_everything_but_noise_and_noise_levels() -> None:
    [probe] = probes([[5]])
    batch: StepBatch = with_sigma(probe, 0.25, 0)
    same = replace(probe, noise=batch.noise, sigmas=batch.sigmas)
    assert same.latents is batch.latents and same.positions == batch.positions and same.text is batch.text
