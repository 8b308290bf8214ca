"""The forecast of a window on the CPU agrees within 5 % with what torch's profiler measures in a real window.

The profiler records every allocation and release of torch's CPU allocator. Scratch memory that oneDNN allocates itself
is neither measured nor forecast.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import NullSink
from supertuner.models.spec import Expert, Family, ModelDescription
from supertuner.plan.trace.cpu_kernels import CpuDevice
from supertuner.plan.trace.encoder_shapes import CPU, BatchShape, EncoderShapeProbe
from supertuner.plan.trace.recorder import inner_tensors
from supertuner.plan.trace.trace_training_step import trace_training_step
from supertuner.step.batch import StepBatch
from supertuner.step.expert_setup import (
    build_expert_state,
    build_step_options,
    build_trainable_expert,
    quantize_base_weights,
    weight_dtype,
)
from supertuner.step.precision import ComputePrecision
from supertuner.step.train_step import ExpertState, train_window
from tests.models.families.pipelines import CASES, WrittenPipeline

TOLERANCE = 0.05
FAMILIES = [case for case in CASES if case.name in ("wan-t2v", "flux-dev", "qwen-image")]
SETTINGS: list[dict[str, Any]] = [
    {"adapter": {"type": "lora", "rank": 4}, "train": {"mixed_precision": "fp32"}},
    {"adapter": {"type": "lora", "rank": 4}},
    {"adapter": {"type": "full"}, "train": {"gradient_checkpointing": True, "ema_decay": 0.9}},
]


def larger(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A larger shape, so that activations are most of the memory."""
    return (*shape[:-2], shape[-2] * 8, shape[-1] * 8)


def run(
    config: RunConfig, family: Family, model: ModelDescription, expert: Expert, shape: BatchShape, windows: int
) -> tuple[int, int]:
    """Bytes in memory before the last window, and the peak of what it allocated in addition. Measured."""
    precision = ComputePrecision(config.train.mixed_precision, CPU)
    module = family.load_denoiser(model, expert, weight_dtype(config, precision))
    quantize_base_weights(config, module, precision, NullSink())
    expert_state = build_expert_state(
        config, expert, build_trainable_expert(config, family, expert, module, precision, NullSink()), precision
    )
    options = build_step_options(config, family, model, precision, NullSink())
    batch = StepBatch(
        latents=torch.randn(shape.samples, *shape.latents).to(shape.latents_dtype),
        noise=torch.randn(shape.samples, *shape.latents),
        sigmas=torch.full((shape.samples,), 0.9),
        text={name: torch.ones(shape.samples, *one.shape, dtype=one.dtype) for name, one in shape.text.items()},
        conditions={name: torch.ones(shape.samples, *one.shape) for name, one in shape.conditions.items()},
    )

    def window() -> None:
        train_window(expert_state, [batch], samples=shape.samples, learning_rate=1e-4, options=options)

    for _ in range(windows - 1):
        window()
    before = resident_bytes(expert_state, batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        window()
    recorded = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    events = [one for one in recorded if one.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return before, peak


def resident_bytes(expert_state: ExpertState, batch: StepBatch) -> int:
    state = [value for states in expert_state.optimizer.torch_optimizer.state.values() for value in states.values()]
    averages = [] if expert_state.ema is None else list(expert_state.ema.averages.values())
    tables = [value for part in expert_state.module.modules() for value in vars(part).values()]  # RoPE of Qwen-Image
    module = expert_state.module
    tensors = (*module.parameters(), *module.buffers(), *batch.tensors(), *tables, *state, *averages)
    storages = {
        plain.untyped_storage().data_ptr(): plain.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
        for plain in inner_tensors(tensor)
    }
    return sum(storages.values())


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("written", FAMILIES, ids=lambda case: case.name, indirect=True)
def test_the_forecast_agrees_with_the_profiler(written: WrittenPipeline, settings: dict[str, Any]) -> None:
    family, model, expert = written.family, written.model, written.model.experts[0]
    case = written.case
    config = RunConfig.model_validate(settings)
    shape = EncoderShapeProbe(config, family, model).batch_shape(1, larger(case.shape))
    before, allocated = run(config, family, model, expert, shape, windows=2)
    peak, _ = trace_training_step(config, family, model, expert, shape, device=CpuDevice()).peak()
    assert allocated > before, "most of the memory must be activations"
    assert peak == pytest.approx(before + allocated, rel=TOLERANCE)
