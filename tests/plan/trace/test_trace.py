"""A traced step equals the real one: tensors by class, order of blocks, work by arithmetic; and so does its table."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import NullSink
from supertuner.models.blocks import named_blocks
from supertuner.models.family_loader import load_family as family_of
from supertuner.models.spec import Family, ModelDescription, ModelSource
from supertuner.plan.trace.encoder_shapes import CPU, BatchShape, BatchTensorSpec, EncoderShapeProbe
from supertuner.plan.trace.execution_trace import OUTSIDE_BLOCKS, ExecutionTrace, StepPass, TensorKind
from supertuner.plan.trace.recorder import PLAIN_CPU, TraceRecorder, inner_tensors
from supertuner.plan.trace.step_table_builder import build_step_table
from supertuner.plan.trace.trace_training_step import trace_training_step, with_checkpointing
from supertuner.step.batch import StepBatch
from supertuner.step.expert_setup import (
    build_expert_state,
    build_step_options,
    build_trainable_expert,
    quantize_base_weights,
    weight_dtype,
)
from supertuner.step.precision import ComputePrecision, latent_storage_dtype
from supertuner.step.train_step import ExpertState, train_window
from tests.models.families.pipelines import CASES, WrittenPipeline

ADAPTERS: list[dict[str, Any]] = [
    {"adapter": {"type": "lora", "rank": 4}},
    {"adapter": {"type": "lora", "rank": 4, "dora": True}},
    {"adapter": {"type": "lokr", "rank": 4}},
    {"adapter": {"type": "diff"}},
    {"adapter": {"type": "full"}},
    {"adapter": {"type": "lora"}, "model": {"base_weights": "int8"}},
]
EVERY = [case for case in CASES if case.name not in ("wan-one-expert", "flux-schnell", "sd3", "sdxl-v")]
OPTIMIZERS = ["adamw", "adamw8bit", "adafactor", "prodigy", "schedule_free", "lion", "automagic"]


@pytest.fixture(scope="module")
def wan(tiny_wan: ModelSource) -> tuple[Family, ModelDescription]:
    family = family_of("wan2.2")
    return family, family.read_model(tiny_wan)


def configured(**blocks: Any) -> RunConfig:
    return RunConfig.model_validate(blocks)


@cache
def shape_probe(family: str, path: str, **blocks: Any) -> EncoderShapeProbe:
    loaded = family_of(family)
    return EncoderShapeProbe(configured(**blocks), loaded, loaded.read_model(ModelSource(path)))


def shaped(
    config: RunConfig, family: Family, model: ModelDescription, media: tuple[int, ...], samples: int = 1
) -> BatchShape:
    """The batch shape for a configuration; the encoders are probed once for all tests."""
    probed = shape_probe(family.name, model.source.path).batch_shape(samples, media)
    prior = {"prior": BatchTensorSpec((), torch.bool)} if any(one.prior for one in config.datasets) else {}
    stored = latent_storage_dtype(ComputePrecision(config.train.mixed_precision, CPU).dtype)
    return replace(probed, loss_inputs=prior, latents_dtype=stored)


def traced(
    config: RunConfig, family: Family, model: ModelDescription, media: tuple[int, ...], **options: Any
) -> ExecutionTrace:
    shape = shaped(config, family, model, media, options.pop("samples", 1))
    if "checkpointing" in options:
        config = with_checkpointing(config, options.pop("checkpointing"))
    return trace_training_step(config, family, model, model.experts[0], shape, **options)


def run_window(
    config: RunConfig, family: Family, model: ModelDescription, media: tuple[int, ...]
) -> tuple[ExpertState, dict[str, int]]:
    """Really computes the same window. Returns its expert state, and the bytes of its batch and gradients."""
    precision, expert = ComputePrecision(config.train.mixed_precision, CPU), model.experts[0]
    module = family.load_denoiser(model, expert, weight_dtype(config, precision))
    quantize_base_weights(config, module, precision, NullSink())
    trained = build_trainable_expert(config, family, expert, module, precision, NullSink())
    expert_state = build_expert_state(config, expert, trained, precision)
    shape = shaped(config, family, model, media)
    batch = StepBatch(
        latents=torch.randn(1, *shape.latents).to(shape.latents_dtype),
        noise=torch.randn(1, *shape.latents),
        sigmas=torch.tensor([0.9]),
        text={name: torch.randn(1, *one.shape).to(one.dtype) for name, one in shape.text.items()},
        conditions={name: torch.randn(1, *one.shape).to(one.dtype) for name, one in shape.conditions.items()},
    )
    found = {"batch": sum(one.nbytes for one in batch.tensors())}

    def fetch(figures: torch.Tensor) -> list[float]:
        found["gradients"] = sum(p.grad.nbytes for p in expert_state.parameters.values() if p.grad is not None)
        return figures.tolist()

    options = build_step_options(config, family, model, precision, NullSink())
    train_window(expert_state, [batch], samples=1, learning_rate=1e-4, options=replace(options, copy_to_host=fetch))
    return expert_state, found


def stored(tensor: torch.Tensor) -> int:
    return sum(one.untyped_storage().nbytes() for one in inner_tensors(tensor))


def state_bytes(expert_state: ExpertState) -> int:
    values = [value for state in expert_state.optimizer.torch_optimizer.state.values() for value in state.values()]
    averages = [] if expert_state.ema is None else list(expert_state.ema.averages.values())
    tensors = [plain for one in (*values, *averages) if isinstance(one, torch.Tensor) for plain in inner_tensors(one)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())  # some optimizers share one storage


def of(trace: ExecutionTrace, kind: TensorKind) -> int:
    return int(trace.nbytes[trace.kind == kind].sum())


@pytest.mark.parametrize("settings", ADAPTERS, ids=str)
def test_a_trace_has_the_weights_gradients_and_state_of_a_real_window(
    wan: tuple[Family, ModelDescription], settings: dict[str, Any]
) -> None:
    config = configured(**settings, train={"ema_decay": 0.99})
    trace = traced(config, *wan, (3, 5, 32, 48))
    expert_state, found = run_window(config, *wan, (3, 5, 32, 48))
    trained = sum(stored(one) for one in expert_state.parameters.values())
    everything = {one.data_ptr(): stored(one) for one in expert_state.module.parameters()}
    assert of(trace, TensorKind.TRAINED) == trained
    assert of(trace, TensorKind.GRADIENT) == found["gradients"]
    assert of(trace, TensorKind.STATE) == state_bytes(expert_state)
    assert of(trace, TensorKind.BATCH) == found["batch"]
    buffers = sum(stored(one) for one in expert_state.module.buffers())
    if "model" not in settings:  # tensor subclasses have no data pointer
        assert of(trace, TensorKind.FROZEN) == sum(everything.values()) - trained + buffers


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_on_fake_tensors_and_has_its_real_state(
    wan: tuple[Family, ModelDescription], name: str
) -> None:
    config = configured(optimizer={"name": name}, adapter={"rank": 32})
    trace = traced(config, *wan, (3, 5, 32, 48))
    expert_state, _ = run_window(config, *wan, (3, 5, 32, 48))
    real_bytes = state_bytes(expert_state)
    zero = sum(one.nbytes for name, one in expert_state.parameters.items() if ".lora_B." in name)
    if name == "prodigy":  # it stores initial weights unless they are all zero, which fake tensors cannot tell
        real_bytes += zero
    assert of(trace, TensorKind.STATE) == pytest.approx(real_bytes, abs=64)
    assert trace.total_work(StepPass.UPDATE).operators > 0


@pytest.mark.parametrize("written", EVERY, indirect=True, ids=lambda case: case.name)
def test_every_family_can_be_traced_with_checkpointing(written: WrittenPipeline) -> None:
    config = configured(train={"gradient_checkpointing": True})
    trace = traced(config, written.family, written.model, written.case.shape, samples=2)
    part = written.model.experts[0].component
    names = {span.block for span in trace.spans if span.step_pass is StepPass.RECOMPUTE}
    assert (trace.blocks[0], trace.blocks[-1]) == OUTSIDE_BLOCKS
    assert len(trace.blocks) > 3 and len(names) >= (1 if part == "unet" else 2), part
    assert of(trace, TensorKind.GRADIENT) == pytest.approx(of(trace, TensorKind.TRAINED), rel=0.2)
    assert trace.total_work(StepPass.BACKWARD).matmul_flops > 0


@pytest.mark.parametrize("written", [case for case in CASES if case.name == "sdxl"], indirect=True)
@pytest.mark.parametrize("kind", ["lokr", "loha", "locon"])
def test_adapters_on_convolutions_can_be_traced(written: WrittenPipeline, kind: str) -> None:
    config = configured(adapter={"type": kind, "rank": 4, "targets": "all_layers"})
    trace = traced(config, written.family, written.model, written.case.shape)
    expert_state, found = run_window(config, written.family, written.model, written.case.shape)
    assert of(trace, TensorKind.TRAINED) == sum(stored(one) for one in expert_state.parameters.values())
    assert of(trace, TensorKind.GRADIENT) == found["gradients"]


def test_only_weights_state_and_batch_outlive_the_step(wan: tuple[Family, ModelDescription]) -> None:
    trace = traced(configured(), *wan, (3, 5, 32, 48))
    live = trace.live_bytes()
    assert (trace.death > trace.birth).all() and (live >= 0).all()
    lasting = {TensorKind.FROZEN, TensorKind.TRAINED, TensorKind.STATE, TensorKind.BATCH}
    assert set(trace.kind[trace.death == trace.end]) <= {int(kind) for kind in lasting}
    assert live[trace.end - 1] == live[0] and live[trace.end] == 0
    _, at = trace.peak()
    assert sum(trace.live_bytes_by_kind(at).values()) == live[at]


def test_blocks_run_in_order_forward_and_in_reverse_order_backward(wan: tuple[Family, ModelDescription]) -> None:
    family, model = wan
    trace = traced(configured(train={"gradient_checkpointing": True}), *wan, (3, 5, 32, 48))
    named = list(named_blocks(family.load_denoiser(model, model.experts[0], torch.float32)))
    assert list(trace.blocks) == [OUTSIDE_BLOCKS[0], *named, OUTSIDE_BLOCKS[1]]
    numbers = {during: _visited(trace, during) for during in StepPass}
    inner = list(range(1, len(trace.blocks) - 1))
    assert [one for one in numbers[StepPass.FORWARD] if one in inner] == inner
    assert [one for one in numbers[StepPass.BACKWARD] if one in inner] == inner[::-1]
    assert numbers[StepPass.RECOMPUTE] == inner[::-1]


def _visited(trace: ExecutionTrace, during: StepPass) -> list[int]:
    found = [one.block for one in trace.spans if one.step_pass is during]
    return [block for number, block in enumerate(found) if block not in found[:number]]


def test_checkpointing_recomputes_the_blocks_and_saves_less(wan: tuple[Family, ModelDescription]) -> None:
    config = configured(train={"gradient_checkpointing": True})
    kept, again = traced(config, *wan, (3, 9, 64, 64), checkpointing=False), traced(config, *wan, (3, 9, 64, 64))
    assert kept.total_work(StepPass.RECOMPUTE).operators == 0
    inside = sum(one.work.matmul_flops for one in kept.spans if one.step_pass is StepPass.FORWARD and one.block > 0)
    assert again.total_work(StepPass.RECOMPUTE).matmul_flops == pytest.approx(inside, rel=0.15)
    assert (
        again.live_bytes_of_kind(TensorKind.ACTIVATION).max()
        < 0.8 * kept.live_bytes_of_kind(TensorKind.ACTIVATION).max()
    )


def test_work_is_proportional_to_the_batch_and_backward_is_twice_forward(
    wan: tuple[Family, ModelDescription],
) -> None:
    config = configured(adapter={"type": "full"}, train={"mixed_precision": "fp32"})
    one, four = (traced(config, *wan, (3, 5, 32, 48), samples=n) for n in (1, 4))
    for during in (StepPass.FORWARD, StepPass.BACKWARD):
        assert four.total_work(during).matmul_flops == pytest.approx(4 * one.total_work(during).matmul_flops)
    linear = _linear_flops(wan[1], one)
    back = one.total_work(StepPass.BACKWARD).matmul_flops / one.total_work(StepPass.FORWARD).matmul_flops
    assert linear < one.total_work(StepPass.FORWARD).matmul_flops
    assert 1.9 < back < 2.5  # attention recomputes its scores: five products instead of two


def _linear_flops(model: ModelDescription, trace: ExecutionTrace) -> float:
    """Operations of the blocks' feed-forward layers, by hand: two products of 2 · tokens · width · inner each."""
    config = model.configs["transformer"]
    width = int(str(config["num_attention_heads"])) * int(str(config["attention_head_dim"]))
    tokens = 2 * 2 * 3  # 5 frames become 2, 32×48 pixels 4×6 latents, and a token is 2×2 latents
    blocks = len(trace.blocks) - 2
    return blocks * 2 * 2.0 * tokens * width * int(str(config["ffn_dim"]))


def test_micro_batches_share_gradients_and_one_update(wan: tuple[Family, ModelDescription]) -> None:
    one, three = (traced(configured(), *wan, (3, 5, 32, 48), micro_batches=n) for n in (1, 3))
    assert of(three, TensorKind.GRADIENT) == of(one, TensorKind.GRADIENT)
    assert three.total_work(StepPass.FORWARD).matmul_flops == pytest.approx(
        3 * one.total_work(StepPass.FORWARD).matmul_flops
    )
    assert three.total_work(StepPass.UPDATE).gpu_bytes == pytest.approx(
        one.total_work(StepPass.UPDATE).gpu_bytes, rel=0.01
    )


def test_prior_samples_cost_a_second_forward_pass(wan: tuple[Family, ModelDescription]) -> None:
    plain = traced(configured(), *wan, (3, 5, 32, 48))
    prior = traced(configured(datasets=[{"prior": True}]), *wan, (3, 5, 32, 48))
    assert prior.total_work(StepPass.FORWARD).matmul_flops == pytest.approx(
        2 * plain.total_work(StepPass.FORWARD).matmul_flops
    )
    assert of(prior, TensorKind.STATE) == of(plain, TensorKind.STATE) + of(plain, TensorKind.TRAINED)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_every_precision_is_traced_with_clipping(wan: tuple[Family, ModelDescription], precision: str) -> None:
    config = configured(train={"mixed_precision": precision, "max_grad_norm": 1.0})
    trace = traced(config, *wan, (3, 5, 32, 48))
    assert trace.total_work(StepPass.UPDATE).operators > 0
    frozen = of(traced(configured(train={"mixed_precision": "bf16"}), *wan, (3, 5, 32, 48)), TensorKind.FROZEN)
    assert (of(trace, TensorKind.FROZEN) > frozen) == (precision == "fp32")


def test_the_table_of_a_trace_adds_up_to_its_peak(wan: tuple[Family, ModelDescription]) -> None:
    """The peak is: weights and state, activations that blocks have saved so far, and the temporaries of one block."""
    trace = traced(configured(), *wan, (3, 9, 64, 64))
    table = build_step_table(trace, micro_batches=2)
    assert [block.name for block in table.blocks] == list(trace.blocks)
    assert sum(b.frozen_bytes for b in table.blocks) == of(trace, TensorKind.FROZEN)
    assert sum(b.saved_bytes for b in table.blocks) == int(trace.live_bytes_of_kind(TensorKind.ACTIVATION).max())
    assert all(b.input_bytes > 0 and b.saved_bytes > b.input_bytes for b in table.blocks[1:-1])
    standing = table.weight_bytes + sum(b.state_bytes for b in table.blocks) + table.batch_bytes
    saved = np.cumsum([block.saved_bytes for block in table.blocks])
    most = max(
        int(s) + max(b.forward_peak_bytes, b.backward_peak_bytes) for s, b in zip(saved, table.blocks, strict=True)
    )
    peak, _ = trace.peak()
    assert peak - sum(b.gradient_bytes for b in table.blocks) <= standing + most <= peak
    assert sum((b.forward for b in table.blocks), start=type(table.update)()) == trace.total_work(StepPass.FORWARD)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_every_block_has_a_share_of_the_backward_peak(wan: tuple[Family, ModelDescription], kind: str) -> None:
    """Operators outside all blocks run between blocks and at the end: they count for the block whose turn it is."""
    table = build_step_table(traced(configured(adapter={"type": kind}), *wan, (3, 17, 96, 96), checkpointing=False))
    saved = sum(block.saved_bytes for block in table.blocks)
    inner = [block.backward_peak_bytes for block in table.blocks[1:-1]]
    assert min(inner) > 0
    assert max(block.backward_peak_bytes for block in table.blocks) < saved / 2


def test_the_table_of_a_step_without_recomputation_predicts_the_peak_with_it(
    wan: tuple[Family, ModelDescription],
) -> None:
    config = configured(train={"gradient_checkpointing": True})
    table = build_step_table(traced(config, *wan, (3, 17, 96, 96), checkpointing=False))
    traced_peak, _ = traced(config, *wan, (3, 17, 96, 96)).peak()
    standing = table.weight_bytes + sum(b.state_bytes for b in table.blocks) + table.batch_bytes
    stays = most = 0
    for block in table.blocks:
        again = block.saved_bytes if block.recomputable else 0
        stays += block.input_bytes if block.recomputable else block.saved_bytes
        most = max(most, stays + again + max(block.forward_peak_bytes, block.backward_peak_bytes))
    assert standing + most == pytest.approx(traced_peak, rel=0.1)


def test_an_operator_on_8_bit_state_counts_the_tensors_inside_and_not_the_wrapper() -> None:
    from torchao.optim.subclass_8bit import OptimState8bit

    def update() -> None:
        state.copy_(state.float().lerp(gradient, 0.1))

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        return OptimState8bit.zeros((64, 256), dtype=torch.float32), torch.ones(64, 256)

    state, gradient = make()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        update()
    recorded = [one for one in profiled.profiler.kineto_results.events() if one.name() == "[memory]"]  # type: ignore[union-attr]
    changes = [one.nbytes() for one in sorted(recorded, key=lambda one: one.start_ns())]
    recorder = TraceRecorder(PLAIN_CPU)
    with FakeTensorMode():
        state, gradient = make()
        with recorder:
            update()
    peak, _ = recorder.build_trace("update").peak()
    assert peak == pytest.approx(max(accumulate(changes)), rel=0.01)
