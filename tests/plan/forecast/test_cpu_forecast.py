"""On the CPU a window really runs: what torch's profiler saw its allocator hand out is what was forecast, to 5 %.

The profiler writes down every block that the CPU's allocator gives and takes back. Scratch memory that oneDNN takes by
itself is not among them, and not in the forecast.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from supertuner.config.settings.tree import RunConfig
from supertuner.core.events import Silence
from supertuner.models.spec import Expert, Family, Model
from supertuner.plan.trace.cpu_kernels import Cpu
from supertuner.plan.trace.recorder import plain_tensors
from supertuner.plan.trace.shapes import CPU, BatchShape, Shaper
from supertuner.plan.trace.training import trace_training
from supertuner.step.batch import StepBatch
from supertuner.step.precision import Precision
from supertuner.step.trainee import rules_of, store_base, trained_of, trainee_of, weight_format
from supertuner.step.window import Trainee, train_window
from tests.models.families.pipelines import CASES, Written

PROMISED = 0.05
FAMILIES = [case for case in CASES if case.name in ("wan-t2v", "flux-dev", "qwen-image")]
SETTINGS: list[dict[str, Any]] = [
    {"adapter": {"type": "lora", "rank": 4}, "train": {"mixed_precision": "fp32"}},
    {"adapter": {"type": "lora", "rank": 4}},
    {"adapter": {"type": "full"}, "train": {"gradient_checkpointing": True, "ema_decay": 0.9}},
]


def larger(shape: tuple[int, ...]) -> tuple[int, ...]:
    """So that activations are most of what is there."""
    return (*shape[:-2], shape[-2] * 8, shape[-1] * 8)


def run(
    config: RunConfig, family: Family, model: Model, expert: Expert, shape: BatchShape, windows: int
) -> tuple[int, int]:
    """What was there before the last window, and the most that it took beside that."""
    precision = Precision(config.train.mixed_precision, CPU)
    module = family.denoiser(model, expert, weight_format(config, precision))
    store_base(config, module, precision, Silence())
    trainee = trainee_of(config, expert, trained_of(config, family, expert, module, precision, Silence()), precision)
    rules = rules_of(config, family, model, precision, Silence())
    batch = StepBatch(
        latents=torch.randn(shape.samples, *shape.latents).to(shape.latents_dtype),
        noise=torch.randn(shape.samples, *shape.latents),
        levels=torch.full((shape.samples,), 0.9),
        text={name: torch.ones(shape.samples, *one.shape, dtype=one.dtype) for name, one in shape.text.items()},
        conditions={name: torch.ones(shape.samples, *one.shape) for name, one in shape.conditions.items()},
    )

    def window() -> None:
        train_window(trainee, [batch], samples=shape.samples, rate=1e-4, rules=rules)

    for _ in range(windows - 1):
        window()
    before = standing(trainee, batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        window()
    events = [one for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]  # type: ignore[union-attr]
    taken = most = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        taken += event.nbytes()
        most = max(most, taken)
    return before, most


def standing(trainee: Trainee, batch: StepBatch) -> int:
    state = [value for states in trainee.optimizer.inner.state.values() for value in states.values()]
    averages = [] if trainee.ema is None else list(trainee.ema.averages.values())
    tables = [value for part in trainee.module.modules() for value in vars(part).values()]  # Qwen-Image's angles
    tensors = (*trainee.module.parameters(), *trainee.module.buffers(), *batch.tensors(), *tables, *state, *averages)
    storages = {
        plain.untyped_storage().data_ptr(): plain.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
        for plain in plain_tensors(tensor)
    }
    return sum(storages.values())


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("written", FAMILIES, ids=lambda case: case.name, indirect=True)
def test_the_profiler_sees_what_was_forecast(written: Written, settings: dict[str, Any]) -> None:
    family, model, expert = written.family, written.model, written.model.experts[0]
    case = written.case
    config = RunConfig.model_validate(settings)
    shape = Shaper(config, family, model).batch(1, larger(case.shape))
    before, most = run(config, family, model, expert, shape, windows=2)
    peak, _ = trace_training(config, family, model, expert, shape, device=Cpu()).peak()
    assert most > before, "activations are what is forecast here"
    assert peak == pytest.approx(before + most, rel=PROMISED)
