"""A traced step is the real one: its tensors by class, its blocks in order, its work by arithmetic; and its table."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from supertuner.config.settings.tree import RunConfig
from supertuner.core.events import Silence
from supertuner.models.blocks import blocks_of
from supertuner.models.spec import Family, Model, Source
from supertuner.models.table import family as family_of
from supertuner.plan.trace.record import AFTER, BEFORE, Kind, Pass, Trace
from supertuner.plan.trace.recorder import plain_tensors
from supertuner.plan.trace.shapes import CPU, BatchShape, Field, Shaper
from supertuner.plan.trace.summary import table_of
from supertuner.plan.trace.training import trace_training
from supertuner.step.batch import StepBatch
from supertuner.step.precision import Precision, stored_dtype
from supertuner.step.trainee import rules_of, store_base, trained_of, trainee_of, weight_format
from supertuner.step.window import Trainee, train_window
from tests.models.families.pipelines import CASES, Written

ADAPTERS: list[dict[str, Any]] = [
    {"adapter": {"type": "lora", "rank": 4}},
    {"adapter": {"type": "lora", "rank": 4, "dora": True}},
    {"adapter": {"type": "lokr", "rank": 4}},
    {"adapter": {"type": "diff"}},
    {"adapter": {"type": "full"}},
    {"adapter": {"type": "lora"}, "model": {"base_weights": "int8"}},
]
EVERY = [case for case in CASES if case.name not in ("wan-one-expert", "flux-schnell", "sd3", "sdxl-v")]
OPTIMIZERS = ["adamw", "adamw8bit", "adafactor", "prodigy", "schedule_free", "automagic"]


@pytest.fixture(scope="module")
def wan(tiny_wan: Source) -> tuple[Family, Model]:
    family = family_of("wan2.2")
    return family, family.read(tiny_wan)


def configured(**blocks: Any) -> RunConfig:
    return RunConfig.model_validate(blocks)


@cache
def shaper(family: str, path: str, **blocks: Any) -> Shaper:
    config, known = configured(**blocks), family_of(family)
    return Shaper(config, known, known.read(Source(path)))


def shaped(config: RunConfig, family: Family, model: Model, media: tuple[int, ...], samples: int = 1) -> BatchShape:
    """As the configuration's own shaper says; shapes of latents and captions are learnt once."""
    learnt = shaper(family.name, model.source.path).batch(samples, media)
    prior = {"prior": Field((), torch.bool)} if any(one.prior for one in config.datasets) else {}
    kept = stored_dtype(Precision(config.train.mixed_precision, CPU).dtype)
    return replace(learnt, counts=prior, latents_dtype=kept)


def traced(config: RunConfig, family: Family, model: Model, media: tuple[int, ...], **how: Any) -> Trace:
    shape = shaped(config, family, model, media, how.pop("samples", 1))
    return trace_training(config, family, model, model.experts[0], shape, **how)


def real(config: RunConfig, family: Family, model: Model, media: tuple[int, ...]) -> tuple[Trainee, dict[str, int]]:
    """The same window, computed; gradients are counted before they are dropped."""
    precision, expert = Precision(config.train.mixed_precision, CPU), model.experts[0]
    module = family.denoiser(model, expert, weight_format(config, precision))
    store_base(config, module, precision, Silence())
    trained = trained_of(config, family, expert, module, precision, Silence())
    trainee = trainee_of(config, expert, trained, precision)
    shape = shaped(config, family, model, media)
    batch = StepBatch(
        latents=torch.randn(1, *shape.latents).to(shape.latents_dtype),
        noise=torch.randn(1, *shape.latents),
        levels=torch.tensor([0.9]),
        text={name: torch.randn(1, *one.shape).to(one.dtype) for name, one in shape.text.items()},
        conditions={name: torch.randn(1, *one.shape).to(one.dtype) for name, one in shape.conditions.items()},
    )
    found = {"batch": sum(one.nbytes for one in batch.tensors())}

    def fetch(figures: torch.Tensor) -> list[float]:
        found["gradients"] = sum(p.grad.nbytes for p in trainee.parameters.values() if p.grad is not None)
        return figures.tolist()

    rules = rules_of(config, family, model, precision, Silence())
    train_window(trainee, [batch], samples=1, rate=1e-4, rules=rules, fetch=fetch)
    return trainee, found


def stored(tensor: torch.Tensor) -> int:
    return sum(one.untyped_storage().nbytes() for one in plain_tensors(tensor))


def state_bytes(trainee: Trainee) -> int:
    values = [value for state in trainee.optimizer.inner.state.values() for value in state.values()]
    averages = [] if trainee.ema is None else list(trainee.ema.averages.values())
    tensors = [plain for one in (*values, *averages) if isinstance(one, torch.Tensor) for plain in plain_tensors(one)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())  # some optimizers cut theirs from one piece


def of(trace: Trace, kind: Kind) -> int:
    return int(trace.nbytes[trace.kind == kind].sum())


@pytest.mark.parametrize("settings", ADAPTERS, ids=str)
def test_weights_gradients_and_state_are_those_of_a_real_window(
    wan: tuple[Family, Model], settings: dict[str, Any]
) -> None:
    config = configured(**settings, train={"ema_decay": 0.99})
    trace = traced(config, *wan, (3, 5, 32, 48))
    trainee, found = real(config, *wan, (3, 5, 32, 48))
    trained = sum(stored(one) for one in trainee.parameters.values())
    everything = {one.data_ptr(): stored(one) for one in trainee.module.parameters()}
    assert of(trace, Kind.TRAINED) == trained
    assert of(trace, Kind.GRADIENT) == found["gradients"]
    assert of(trace, Kind.STATE) == state_bytes(trainee)
    assert of(trace, Kind.BATCH) == found["batch"]
    buffers = sum(stored(one) for one in trainee.module.buffers())
    if "model" not in settings:  # wrappers have no address of their own
        assert of(trace, Kind.FROZEN) == sum(everything.values()) - trained + buffers


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_without_values_and_keeps_what_it_really_keeps(
    wan: tuple[Family, Model], name: str
) -> None:
    config = configured(optimizer={"name": name}, adapter={"rank": 32})
    trace = traced(config, *wan, (3, 5, 32, 48))
    trainee, _ = real(config, *wan, (3, 5, 32, 48))
    really = state_bytes(trainee)
    zero = sum(one.nbytes for name, one in trainee.parameters.items() if ".lora_B." in name)
    if name == "prodigy":  # it keeps where weights began, but not of those that began at zero: who knows?
        really += zero
    assert of(trace, Kind.STATE) == pytest.approx(really, abs=64)
    assert trace.work(Pass.UPDATE).operators > 0


@pytest.mark.parametrize("written", EVERY, indirect=True, ids=lambda case: case.name)
def test_every_family_is_traced_forward_and_backward(written: Written) -> None:
    config = configured(train={"gradient_checkpointing": True})
    trace = traced(config, written.family, written.model, written.case.shape, samples=2)
    part = written.model.experts[0].part
    names = {stretch.block for stretch in trace.stretches if stretch.during is Pass.RECOMPUTE}
    assert trace.blocks[0] == BEFORE and trace.blocks[-1] == AFTER
    assert len(trace.blocks) > 3 and len(names) >= (1 if part == "unet" else 2), part
    assert of(trace, Kind.GRADIENT) == pytest.approx(of(trace, Kind.TRAINED), rel=0.2)
    assert trace.work(Pass.BACKWARD).matmul_flops > 0


def test_memory_that_is_taken_is_given_back(wan: tuple[Family, Model]) -> None:
    trace = traced(configured(), *wan, (3, 5, 32, 48))
    live = trace.live()
    assert (trace.death > trace.birth).all() and (live >= 0).all()
    lasting = {Kind.FROZEN, Kind.TRAINED, Kind.STATE, Kind.BATCH}
    assert set(trace.kind[trace.death == trace.end]) <= {int(kind) for kind in lasting}
    assert live[trace.end - 1] == live[0] and live[trace.end] == 0
    _, at = trace.peak()
    assert sum(trace.by_kind(at).values()) == live[at]


def test_blocks_are_passed_in_order_forward_and_in_the_opposite_backward(wan: tuple[Family, Model]) -> None:
    family, model = wan
    trace = traced(configured(train={"gradient_checkpointing": True}), *wan, (3, 5, 32, 48))
    named = list(blocks_of(family.denoiser(model, model.experts[0], torch.float32)))
    assert list(trace.blocks) == [BEFORE, *named, AFTER]
    numbers = {during: _visited(trace, during) for during in Pass}
    inner = list(range(1, len(trace.blocks) - 1))
    assert [one for one in numbers[Pass.FORWARD] if one in inner] == inner
    assert [one for one in numbers[Pass.BACKWARD] if one in inner] == inner[::-1]
    assert numbers[Pass.RECOMPUTE] == inner[::-1]


def _visited(trace: Trace, during: Pass) -> list[int]:
    found = [one.block for one in trace.stretches if one.during is during]
    return [block for number, block in enumerate(found) if block not in found[:number]]


def test_checkpointing_recomputes_the_blocks_and_keeps_less(wan: tuple[Family, Model]) -> None:
    config = configured(train={"gradient_checkpointing": True})
    kept, again = traced(config, *wan, (3, 9, 64, 64), checkpointing=False), traced(config, *wan, (3, 9, 64, 64))
    assert kept.work(Pass.RECOMPUTE).operators == 0
    inside = sum(one.work.matmul_flops for one in kept.stretches if one.during is Pass.FORWARD and one.block > 0)
    assert again.work(Pass.RECOMPUTE).matmul_flops == pytest.approx(inside, rel=0.15)
    assert again.live_of(Kind.ACTIVATION).max() < 0.8 * kept.live_of(Kind.ACTIVATION).max()


def test_work_grows_with_the_batch_and_a_full_update_costs_two_products_back_for_one_forth(
    wan: tuple[Family, Model],
) -> None:
    config = configured(adapter={"type": "full"}, train={"mixed_precision": "fp32"})
    one, four = (traced(config, *wan, (3, 5, 32, 48), samples=n) for n in (1, 4))
    for during in (Pass.FORWARD, Pass.BACKWARD):
        assert four.work(during).matmul_flops == pytest.approx(4 * one.work(during).matmul_flops)
    linear = _linear_flops(wan[1], one)
    back = one.work(Pass.BACKWARD).matmul_flops / one.work(Pass.FORWARD).matmul_flops
    assert linear < one.work(Pass.FORWARD).matmul_flops
    assert 1.9 < back < 2.5  # attention makes its scores again: five products for two


def _linear_flops(model: Model, trace: Trace) -> float:
    """Of one block's feed-forward layers, by hand: two products of 2 · tokens · width · inner each."""
    config = model.configs["transformer"]
    width = int(str(config["num_attention_heads"])) * int(str(config["attention_head_dim"]))
    tokens = 2 * 2 * 3  # 5 frames are 2, 32×48 are 4×6 in latents, and a token is 2×2 of them
    blocks = len(trace.blocks) - 2
    return blocks * 2 * 2.0 * tokens * width * int(str(config["ffn_dim"]))


def test_micro_batches_share_gradients_and_one_update(wan: tuple[Family, Model]) -> None:
    one, three = (traced(configured(), *wan, (3, 5, 32, 48), micro_batches=n) for n in (1, 3))
    assert of(three, Kind.GRADIENT) == of(one, Kind.GRADIENT)
    assert three.work(Pass.FORWARD).matmul_flops == pytest.approx(3 * one.work(Pass.FORWARD).matmul_flops)
    assert three.work(Pass.UPDATE).gpu_bytes == pytest.approx(one.work(Pass.UPDATE).gpu_bytes, rel=0.01)


def test_samples_that_keep_the_prior_cost_a_second_forward_pass(wan: tuple[Family, Model]) -> None:
    plain = traced(configured(), *wan, (3, 5, 32, 48))
    prior = traced(configured(datasets=[{"prior": True}]), *wan, (3, 5, 32, 48))
    assert prior.work(Pass.FORWARD).matmul_flops == pytest.approx(2 * plain.work(Pass.FORWARD).matmul_flops)
    assert of(prior, Kind.STATE) == of(plain, Kind.STATE) + of(plain, Kind.TRAINED)  # as they were


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_every_precision_is_traced_with_clipping(wan: tuple[Family, Model], precision: str) -> None:
    config = configured(train={"mixed_precision": precision, "max_grad_norm": 1.0})
    trace = traced(config, *wan, (3, 5, 32, 48))
    assert trace.work(Pass.UPDATE).operators > 0
    frozen = of(traced(configured(train={"mixed_precision": "bf16"}), *wan, (3, 5, 32, 48)), Kind.FROZEN)
    assert (of(trace, Kind.FROZEN) > frozen) == (precision == "fp32")


def test_the_table_of_a_trace_adds_up_to_its_peak(wan: tuple[Family, Model]) -> None:
    """Weights and state all the time, what blocks saved so far, and what the one at work needs."""
    trace = traced(configured(), *wan, (3, 9, 64, 64))
    table = table_of(trace, micro_batches=2)
    assert [block.name for block in table.blocks] == list(trace.blocks)
    assert sum(b.frozen_bytes for b in table.blocks) == of(trace, Kind.FROZEN)
    assert sum(b.saved_bytes for b in table.blocks) == int(trace.live_of(Kind.ACTIVATION).max())
    assert all(b.input_bytes > 0 and b.saved_bytes > b.input_bytes for b in table.blocks[1:-1])
    standing = table.weight_bytes + sum(b.state_bytes for b in table.blocks) + table.batch_bytes
    saved = np.cumsum([block.saved_bytes for block in table.blocks])
    most = max(
        int(s) + max(b.forward_peak_bytes, b.backward_peak_bytes) for s, b in zip(saved, table.blocks, strict=True)
    )
    peak, _ = trace.peak()
    assert peak - sum(b.gradient_bytes for b in table.blocks) <= standing + most <= peak
    assert sum((b.forward for b in table.blocks), start=type(table.update)()) == trace.work(Pass.FORWARD)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_every_block_needs_something_in_its_backward_pass_and_none_needs_everything(
    wan: tuple[Family, Model], kind: str
) -> None:
    """What belongs to no block runs at the end of a pass and in between: it is nobody's need but whose turn it is."""
    table = table_of(traced(configured(adapter={"type": kind}), *wan, (3, 17, 96, 96), checkpointing=False))
    saved = sum(block.saved_bytes for block in table.blocks)
    inner = [block.backward_peak_bytes for block in table.blocks[1:-1]]
    assert min(inner) > 0
    assert max(block.backward_peak_bytes for block in table.blocks) < saved / 2


def test_the_table_of_a_step_that_keeps_all_says_what_recomputing_all_would_need(wan: tuple[Family, Model]) -> None:
    config = configured(train={"gradient_checkpointing": True})
    table = table_of(traced(config, *wan, (3, 17, 96, 96), checkpointing=False))
    traced_peak, _ = traced(config, *wan, (3, 17, 96, 96)).peak()
    standing = table.weight_bytes + sum(b.state_bytes for b in table.blocks) + table.batch_bytes
    stays = most = 0
    for block in table.blocks:
        again = block.saved_bytes if block.recomputable else 0
        stays += block.input_bytes if block.recomputable else block.saved_bytes
        most = max(most, stays + again + max(block.forward_peak_bytes, block.backward_peak_bytes))
    assert standing + most == pytest.approx(traced_peak, rel=0.1)
