"""A window of the configured run at full size on fake tensors: the run's own code, no weights, no GPU, no network.

The module is made from its config alone, adapters, optimizer and objective as the run makes them (`step/trainee.py`),
and the function that is traced is the one that the loop calls (`step/window.py`). Nothing is computed, so values are
unknown: what is asked of one (a norm, an optimizer's own estimate) is answered with 1.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from supertuner.config.tree import RunConfig
from supertuner.core.events import Event
from supertuner.models.blocks import blocks_of
from supertuner.models.hollow import filled
from supertuner.models.spec import Expert, Family, Model
from supertuner.plan.record import Kind, Trace
from supertuner.plan.recorder import Device, Plain, Recorder
from supertuner.plan.shapes import CPU, BatchShape, Field, hollowed
from supertuner.step.batch import StepBatch
from supertuner.step.precision import Precision
from supertuner.step.trainee import rules_of, store_base, trained_of, trainee_of, weight_format
from supertuner.step.window import Trainee, train_window


class Unheard:
    """A sink that nobody listens to."""

    def emit(self, event: Event) -> None: ...


def trace_training(
    config: RunConfig,
    family: Family,
    model: Model,
    expert: Expert,
    shape: BatchShape,
    *,
    checkpointing: bool | None = None,
    micro_batches: int = 1,
    device: Device | None = None,
) -> Trace:
    """One optimizer step of an expert. `checkpointing`: instead of what the configuration says."""
    config, model = _traced(config, checkpointing), hollowed(model)
    device = device or Plain()
    precision = Precision(config.train.mixed_precision, CPU)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        module = family.denoiser(model, expert, weight_format(config, precision))
        store_base(config, module, precision, Unheard())
        trained = trained_of(config, family, expert, module, precision, Unheard())
    names = {id(parameter): name for name, parameter in trained.parameters.items()}
    old = {name: parameter for name, parameter in module.named_parameters() if id(parameter) in names}
    filled(module, mode, CPU)
    new = dict(module.named_parameters())
    parameters = {names[id(old[name])]: new[name] for name in old}
    recorder = Recorder(device)
    with mode:
        trainee = trainee_of(config, expert, replace(trained, parameters=parameters), precision)
        rules = rules_of(config, family, model, precision, Unheard())
        recorder.learn()
        recorder.watch(module, blocks_of(module))
        batch = _batch(shape)
        for tensor in batch.tensors():
            recorder.known(tensor, Kind.BATCH)
        _state(recorder, trainee)

        def fetch(figures: torch.Tensor) -> list[float]:
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    recorder.known(parameter.grad, Kind.GRADIENT, recorder.place_of(name))
            return [1.0] * len(figures)

        with device.behaving(), recorder:
            train_window(
                trainee,
                recorder.micro_batches(batch for _ in range(micro_batches)),
                samples=shape.samples * micro_batches,
                rate=trainee.optimizer.base_rate,
                rules=rules,
                fetch=fetch,
            )
        _state(recorder, trainee)
    return recorder.trace(f"train {expert.name}", micro_batches=micro_batches)


def _traced(config: RunConfig, checkpointing: bool | None) -> RunConfig:
    """The configuration without what changes no memory of the step and cannot run on fake tensors."""
    train = config.train
    if checkpointing is not None:
        train = train.model_copy(update={"gradient_checkpointing": checkpointing})
    return config.model_copy(
        update={"train": train, "model": config.model.model_copy(update={"compile": False, "attention": "native"})}
    )


def _batch(shape: BatchShape) -> StepBatch:
    def made(one: Field) -> torch.Tensor:
        return torch.empty(shape.samples, *one.shape, dtype=one.dtype)

    latents = torch.empty(shape.samples, *shape.latents, dtype=shape.latents_dtype)
    return StepBatch(
        latents=latents,
        noise=torch.empty(latents.shape),
        levels=torch.empty(shape.samples),
        text={name: made(one) for name, one in shape.text.items()},
        conditions={name: made(one) for name, one in shape.conditions.items()},
        counts={name: made(one) for name, one in shape.counts.items()},
    )


def _state(recorder: Recorder, trainee: Trainee) -> None:
    """Tell the recorder what the optimizer and the averages keep."""
    names = {id(parameter): name for name, parameter in trainee.parameters.items()}
    for parameter, state in trainee.optimizer.inner.state.items():
        place = recorder.place_of(names.get(id(parameter), ""))
        for value in state.values():
            if isinstance(value, torch.Tensor):
                recorder.known(value, Kind.STATE, place)
    if trainee.ema is not None:
        for name, average in trainee.ema.averages.items():
            recorder.known(average, Kind.STATE, recorder.place_of(name))
