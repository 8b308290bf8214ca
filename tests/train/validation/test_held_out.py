"""The held-out loss: fixed levels, fixed noise, the same bits each time, and right."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from supertuner.core.events import Decided
from supertuner.models.objective.diffusion import sample_noise
from supertuner.models.spec import Expert, Source
from supertuner.sinks.training import HeldOut
from supertuner.step.batch import StepBatch
from supertuner.train.validation.held_out_loss import (
    Probe,
    at_level,
    level_seed,
    line_of,
    measure,
    plan_levels,
    with_means,
)
from tests.step.making import wan_batch
from tests.train.validation.making import Kept, training

HIGH, LOW = Expert("high_noise", "transformer", low=0.875), Expert("low_noise", "transformer_2", high=0.875)


def probes(cut: Sequence[Sequence[int]], side: int = 4) -> list[Probe]:
    return [Probe(wan_batch(indices, side), tuple(indices)) for indices in cut]


def test_an_expert_is_measured_at_the_levels_of_its_range() -> None:
    sink = Kept()
    assert plan_levels([HIGH, LOW], (0.1, 0.5, 0.875, 0.9), sink) == {
        "high_noise": (0.875, 0.9),
        "low_noise": (0.1, 0.5),
    }
    assert sink.events == []


def test_an_expert_without_a_level_is_measured_in_the_middle_of_its_range_and_that_is_said() -> None:
    sink = Kept()
    assert plan_levels([HIGH], (0.1, 0.5), sink) == {"high_noise": (0.9375,)}
    [event] = sink.events
    assert isinstance(event, Decided) and event.what == "validation.held_out_levels[high_noise]"


def test_noise_is_a_function_of_seed_sample_and_level_and_of_nothing_else() -> None:
    [probe] = probes([[3, 8]])
    one = at_level(probe, 0.5, seed=1)
    torch.manual_seed(123)
    again = at_level(Probe(wan_batch([8, 3], 4), (8, 3)), 0.5, seed=1)
    assert torch.equal(one.noise[0], again.noise[1]) and torch.equal(one.noise[1], again.noise[0])
    assert one.levels.tolist() == [0.5, 0.5] and one.levels.dtype == one.noise.dtype == torch.float32
    for other in (at_level(probe, 0.3, seed=1), at_level(probe, 0.5, seed=2)):
        assert not torch.equal(one.noise, other.noise)
    training_noise = sample_noise(1, 3, tuple(probe.batch.latents.shape[1:]))
    assert not torch.equal(one.noise[0], training_noise)
    assert level_seed(1, 0.5) != level_seed(1, 0.3)


def test_the_loss_is_the_mean_square_error_of_the_velocity(tiny_wan: Source) -> None:
    run = training(tiny_wan, dropout=0.0)
    trainee = run.trainees[1]
    [probe] = probes([[0, 1]])
    [row] = measure(trainee, [probe], (0.5,), seed=4, rules=run.rules)
    batch = at_level(probe, 0.5, 4)
    with torch.no_grad():
        noisy = 0.5 * batch.latents + 0.5 * batch.noise
        predicted = run.rules.denoise(trainee.module, noisy, batch.levels, dict(batch.text), {})
    wanted = (predicted - (batch.noise - batch.latents)).square().mean().item()
    assert (row.expert, row.level) == ("low_noise", 0.5)
    assert math.isclose(row.loss, wanted, rel_tol=1e-6)


def test_two_measurements_of_the_same_weights_agree_to_the_bit_and_training_lowers_the_loss(tiny_wan: Source) -> None:
    run = training(tiny_wan)
    trainee, given = run.trainees[1], probes([[0, 1, 2], [3]])
    before = measure(trainee, given, (0.1, 0.5, 0.8), seed=4, rules=run.rules)
    torch.rand(100)
    assert measure(trainee, given, (0.1, 0.5, 0.8), seed=4, rules=run.rules) == before
    for number in range(30):
        run.window(2 * number + 1)
    after = measure(trainee, given, (0.1, 0.5, 0.8), seed=4, rules=run.rules)
    assert with_means(after)[-1].loss < with_means(before)[-1].loss


def test_how_samples_are_batched_hardly_matters(tiny_wan: Source) -> None:
    run = training(tiny_wan)
    trainee = run.trainees[0]
    one = measure(trainee, probes([[0, 1, 2, 3]]), (0.9,), seed=4, rules=run.rules)
    other = measure(trainee, probes([[2], [0, 3], [1]]), (0.9,), seed=4, rules=run.rules)
    assert math.isclose(one[0].loss, other[0].loss, rel_tol=1e-5)


def test_measuring_leaves_no_trace_in_a_module_that_trains(tiny_wan: Source) -> None:
    run = training(tiny_wan)
    trainee = run.trainees[0]
    run.window(0)
    gradients = [p.grad for p in trainee.parameters.values()]
    state, modes = torch.get_rng_state(), [part.training for part in trainee.module.modules()]
    measure(trainee, probes([[0, 1]]), (0.9,), seed=4, rules=run.rules)
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in trainee.module.modules()] == modes and any(modes)
    assert all(p.grad is then for p, then in zip(trainee.parameters.values(), gradients, strict=True))


def test_means_are_of_levels_by_expert_and_of_everything() -> None:
    rows = [HeldOut("high_noise", 0.9, 0.25), HeldOut("low_noise", 0.1, 0.5), HeldOut("low_noise", 0.5, 1.0)]
    assert with_means(rows) == [
        rows[0],
        HeldOut("high_noise", None, 0.25),
        *rows[1:],
        HeldOut("low_noise", None, 0.75),
        HeldOut(None, None, 1.75 / 3),
    ]
    assert with_means([]) == []


def test_a_line_gives_the_exact_number_back_and_none_for_what_is_none() -> None:
    loss = 0.1 + 0.2
    line = line_of(40, HeldOut("model", 0.1, loss))
    assert line == b'{"step": 40, "expert": "model", "level": 0.1, "loss": 0.30000000000000004}\n'
    assert json.loads(line)["loss"] == loss
    assert json.loads(line_of(40, HeldOut("model", 0.1, math.nan)))["loss"] is None


def test_a_batch_keeps_everything_but_noise_and_levels() -> None:
    [probe] = probes([[5]])
    batch: StepBatch = at_level(probe, 0.25, 0)
    same = replace(probe.batch, noise=batch.noise, levels=batch.levels)
    assert same.latents is batch.latents and same.positions == batch.positions and same.text is batch.text
