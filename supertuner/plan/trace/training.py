"""A window of the configured run at full size on fake tensors: the run's own code, no weights, no GPU, no network.

The module is made from its config alone, adapters, optimizer and objective as the run makes them (`step/trainee.py`),
and the function that is traced is the one that the loop calls (`step/window.py`). Nothing is computed, so values are
unknown: what is asked of one (a norm, an optimizer's own estimate) is answered with 1.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from supertuner.config.settings.tree import RunConfig
from supertuner.core.events import Silence
from supertuner.models.blocks import blocks_of
from supertuner.models.hollow import Nowhere, filled
from supertuner.models.spec import Expert, Family, Model
from supertuner.plan.trace.record import Kind, Trace
from supertuner.plan.trace.recorder import Device, Plain, Recorder
from supertuner.plan.trace.shapes import CPU, BatchShape, Field, hollowed
from supertuner.step.batch import StepBatch
from supertuner.step.precision import Precision
from supertuner.step.trainee import rules_of, store_base, trained_of, trainee_of, weight_format
from supertuner.step.window import Trainee, train_window


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
    given, config, model = config, traced_config(config, checkpointing), hollowed(model)
    device = device or Plain()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    trainee = fake_trainee(config, family, model, expert, mode)
    recorder = Recorder(device)
    with mode:
        recorder.learn()
        recorder.watch(trainee.module, blocks_of(trainee.module))
        batch = fake_batch(shape)
        for tensor in batch.tensors():
            recorder.known(tensor, Kind.BATCH)
        told_state(recorder, trainee)

        def fetch(figures: torch.Tensor) -> list[float]:
            for name, parameter in trainee.parameters.items():
                if parameter.grad is not None:
                    recorder.known(parameter.grad, Kind.GRADIENT, recorder.place_of(name))
            return [1.0] * len(figures)

        with device.behaving(), recorder:
            train_window(
                trainee,
                recorder.micro_batches(batch for _ in range(micro_batches)),
                samples=shape.samples * micro_batches,
                rate=trainee.optimizer.base_rate,
                rules=rules_of(config, family, model, Precision(config.train.mixed_precision, CPU), Silence()),
                fetch=fetch,
            )
        told_state(recorder, trainee)
    return recorder.trace(f"train {expert.name}", micro_batches=micro_batches, notes=_left_out(given))


def fake_trainee(config: RunConfig, family: Family, model: Model, expert: Expert, mode: FakeTensorMode) -> Trainee:
    """An expert in training, made as a run makes it, of fake tensors."""
    nowhere = Precision(config.train.mixed_precision, torch.device("meta"))
    with Nowhere():
        module = family.denoiser(model, expert, weight_format(config, nowhere))
        store_base(config, module, nowhere, Silence())
        trained = trained_of(config, family, expert, module, nowhere, Silence())
    ours = {id(parameter): name for name, parameter in trained.parameters.items()}
    theirs = {name: ours[id(parameter)] for name, parameter in module.named_parameters() if id(parameter) in ours}
    filled(module, mode, CPU)
    now = dict(module.named_parameters())
    parameters = {own: now[name] for name, own in theirs.items()}
    with mode:
        precision = Precision(config.train.mixed_precision, CPU)
        return trainee_of(config, expert, replace(trained, parameters=parameters), precision)


def traced_config(config: RunConfig, checkpointing: bool | None) -> RunConfig:
    """The configuration without what changes no memory of the step and cannot run on fake tensors."""
    train = config.train
    if checkpointing is not None:
        train = train.model_copy(update={"gradient_checkpointing": checkpointing})
    return config.model_copy(
        update={"train": train, "model": config.model.model_copy(update={"compile": False, "attention": "native"})}
    )


def _left_out(config: RunConfig) -> tuple[str, ...]:
    """What the configuration says and a trace does not follow."""
    found = []
    if config.model.compile:
        found.append("model.compile: traced as the blocks run without it; compiled, they need less")
    if config.model.attention != "native":
        found.append(f'model.attention "{config.model.attention}": traced as torch\'s own; others save as much')
    return tuple(found)


def fake_batch(shape: BatchShape) -> StepBatch:
    """A batch of nothing."""

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


def told_state(recorder: Recorder, trainee: Trainee, prefix: str = "") -> None:
    """Tell the recorder what the optimizer and the averages keep. The prefix is that of the module's names."""
    names = {id(parameter): name for name, parameter in trainee.parameters.items()}
    for parameter, state in trainee.optimizer.inner.state.items():
        place = recorder.place_of(prefix + names.get(id(parameter), ""))
        for value in state.values():
            if isinstance(value, torch.Tensor):
                recorder.known(value, Kind.STATE, place)
    beside = [] if trainee.ema is None else [trainee.ema.averages]
    beside += getattr(trainee.untrained, "args", ())[1:]  # the values that keep the prior: `adapters.applied`'s second
    for values in beside:
        for name, value in values.items():
            recorder.known(value, Kind.STATE, recorder.place_of(prefix + name))
