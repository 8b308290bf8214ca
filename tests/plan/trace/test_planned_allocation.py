"""The replay of a traced step under a plan. `tests/phantom/test_reserved_memory.py` holds it against torch itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.types import GIB
from supertuner.memory.machines import MACHINES
from supertuner.models.published_models import describe_model
from supertuner.plan.placement.make_plan import make_plan
from supertuner.plan.placement.plan import ActivationPolicy, MemoryPlan, OptimizerPlacement, WeightPlacement
from supertuner.plan.placement.throughput import MemoryLimits
from supertuner.plan.trace.caching_allocator import simulate_allocator
from supertuner.plan.trace.cuda_kernels import CudaDevice
from supertuner.plan.trace.encoder_shapes import EncoderShapeProbe
from supertuner.plan.trace.planned_allocation import TracedStep
from supertuner.plan.trace.step_table_builder import build_step_table
from supertuner.plan.trace.trace_training_step import trace_training_step

GH200 = MACHINES["gh200-96"]
LAYERS = 5


def traced(adapter: str, micro_batches: int = 1) -> TracedStep:
    settings = {
        "model": {"family": "wan2.2", "path": "wan-ai/wan2.2-t2v-a14b-diffusers"},
        "adapter": {"type": adapter},
        "train": {"max_grad_norm": 1.0},
    }
    config = RunConfig.model_validate(settings)
    family, model, _ = describe_model(config.model)
    expert = model.experts[0]
    few_layers = {**model.configs[expert.component], "num_layers": LAYERS}
    model = replace(model, configs={**model.configs, expert.component: few_layers})
    shape = EncoderShapeProbe(config, family, model).batch_shape(1, (3, 33, 480, 832))
    trace = trace_training_step(config, family, model, expert, shape, device=CudaDevice())
    return TracedStep(trace, build_step_table(trace, micro_batches=micro_batches))


@pytest.fixture(scope="module")
def lora() -> TracedStep:
    return traced("lora")


def plan_for(step: TracedStep, gib: float) -> MemoryPlan:
    limits = MemoryLimits(int(gib * GIB), 480 * GIB)
    return make_plan(step.table, GH200, limits, reserved_bytes=step.reserved_bytes)


def with_policy(plan: MemoryPlan, policy: ActivationPolicy) -> MemoryPlan:
    blocks = [row if row.name.startswith("(") else replace(row, activations=policy) for row in plan.blocks]
    return replace(plan, blocks=tuple(blocks))


def test_a_plan_that_moves_nothing_reserves_what_the_step_reserves_without_a_plan(lora: TracedStep) -> None:
    plan = plan_for(lora, 90)
    assert plan.keeps_all_on_gpu
    assert lora.simulate(plan) == simulate_allocator(lora.trace)


def test_recomputed_and_sent_activations_are_not_reserved(lora: TracedStep) -> None:
    keep = plan_for(lora, 90)
    peaks = {policy: lora.simulate(with_policy(keep, policy)) for policy in ActivationPolicy}
    saved = sum(block.saved_bytes for block in lora.table.blocks)
    for policy in (ActivationPolicy.RECOMPUTE, ActivationPolicy.SEND):
        assert peaks[policy].reserved_bytes < peaks[ActivationPolicy.KEEP].reserved_bytes - saved // 3
        assert peaks[policy].allocated_bytes <= peaks[policy].reserved_bytes


def test_streamed_weights_take_their_slots_instead_of_all_blocks(lora: TracedStep) -> None:
    keep = plan_for(lora, 90)
    rows = [row if row.name.startswith("(") else replace(row, weights=WeightPlacement.STREAMED) for row in keep.blocks]
    before, after = lora.simulate(keep), lora.simulate(replace(keep, blocks=tuple(rows), ahead=1))
    frozen = max(block.frozen_bytes for block in lora.table.blocks)
    assert before.allocated_bytes - after.allocated_bytes == pytest.approx((LAYERS - 2) * frozen, rel=0.02)


def test_the_live_bytes_of_the_replay_are_those_of_the_plan(lora: TracedStep) -> None:
    """Two models of the same plan: arithmetic by block, and every single allocation."""
    for gib in (12.0, 10.0, 9.0):
        plan = plan_for(lora, gib)
        assert plan.fits and plan.modelled is not None
        assert lora.simulate(plan).allocated_bytes == pytest.approx(plan.modelled.gpu_peak_bytes, rel=0.03)


@pytest.mark.parametrize("gib", [12.0, 11.0, 10.0, 9.0])
def test_a_plan_reserves_no_more_than_it_was_made_for(lora: TracedStep, gib: float) -> None:
    plan = plan_for(lora, gib)
    assert plan.fits and plan.modelled is not None and plan.modelled.gpu_reserved_bytes is not None
    assert plan.modelled.gpu_peak_bytes < plan.modelled.gpu_reserved_bytes <= gib * GIB
    assert lora.reserved_bytes(plan, int(gib * GIB)) is not None


def test_a_plan_for_live_bytes_alone_would_reserve_more(lora: TracedStep) -> None:
    limits = MemoryLimits(9 * GIB, 480 * GIB)
    plan = make_plan(lora.table, GH200, limits)
    assert plan.fits and plan.modelled is not None and plan.modelled.gpu_peak_bytes <= 9 * GIB
    assert (lora.reserved_bytes(plan, None) or 0) > 9 * GIB


def test_state_in_host_memory_is_on_the_gpu_piece_by_piece() -> None:
    step = traced("full", micro_batches=2)
    keep = plan_for(step, 90)
    on_gpu, streamed, on_host = (step.simulate(replace(keep, stepping=one)) for one in OptimizerPlacement)
    state = sum(block.state_bytes for block in step.table.blocks)
    assert on_host.allocated_bytes < on_gpu.allocated_bytes - state // 2
    assert streamed.allocated_bytes < on_gpu.allocated_bytes
