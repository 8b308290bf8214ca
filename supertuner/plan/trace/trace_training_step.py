"""Traces a window (the micro-batches of one optimizer step) of the configured run at full size on fake tensors: the
run's own code, no weights, no GPU, no network.

The module is built from its config alone. Adapters, optimizer and objective are built as in a run
(`step/expert_setup.py`), and the traced function is the one that the training loop calls (`step/train_step.py`). Fake
tensors have no values: code that reads one (a norm, an optimizer's estimate) gets 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import NullSink
from supertuner.models.blocks import named_blocks
from supertuner.models.meta_modules import MetaDeviceMode, fill_with_fake_tensors
from supertuner.models.spec import Expert, Family, ModelDescription
from supertuner.optim.automagic.optimizer import Automagic
from supertuner.optim.automagic.parameter_batches import DEVICE_ELEMENTS
from supertuner.plan.trace.encoder_shapes import CPU, BatchShape, BatchTensorSpec, without_weights
from supertuner.plan.trace.execution_trace import ExecutionTrace, TensorKind
from supertuner.plan.trace.recorder import PLAIN_CPU, TracedDevice, TraceRecorder
from supertuner.step import expert_setup
from supertuner.step.batch import StepBatch
from supertuner.step.precision import ComputePrecision
from supertuner.step.train_step import ExpertState, train_window


def trace_training_step(
    config: RunConfig,
    family: Family,
    model: ModelDescription,
    expert: Expert,
    shape: BatchShape,
    *,
    micro_batches: int = 1,
    device: TracedDevice = PLAIN_CPU,
) -> ExecutionTrace:
    """One optimizer step of an expert."""
    notes, config, model = _untraced_settings(config), traceable_config(config), without_weights(model)
    precision = ComputePrecision(config.train.mixed_precision, CPU)
    build_options = partial(expert_setup.build_step_options, config, family, model, precision, NullSink())
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    expert_state = build_fake_expert_state(config, family, model, expert, mode)
    optimizer = expert_state.optimizer.torch_optimizer
    if isinstance(optimizer, Automagic) and device.name != CPU.type:  # its batches depend on the device
        optimizer.batch_elements = DEVICE_ELEMENTS
    recorder = TraceRecorder(device)
    with mode:
        recorder.learn_engine_use_counts()
        recorder.track_module(expert_state.module, named_blocks(expert_state.module))
        batch = fake_batch(shape)
        for tensor in batch.tensors():
            recorder.register_tensor(tensor, TensorKind.BATCH)
        register_optimizer_state(recorder, expert_state)

        def fetch(figures: torch.Tensor) -> list[float]:
            for name, parameter in expert_state.parameters.items():
                if parameter.grad is not None:
                    recorder.register_tensor(parameter.grad, TensorKind.GRADIENT, recorder.block_of_parameter(name))
            return [1.0] * len(figures)

        with device.emulate_dispatch(), recorder:
            train_window(
                expert_state,
                recorder.mark_micro_batches(batch for _ in range(micro_batches)),
                samples=shape.samples * micro_batches,
                learning_rate=expert_state.optimizer.base_learning_rate,
                options=replace(build_options(), copy_to_host=fetch),
            )
        register_optimizer_state(recorder, expert_state)
    return recorder.build_trace(f"train {expert.name}", micro_batches=micro_batches, notes=notes)


def build_fake_expert_state(
    config: RunConfig, family: Family, model: ModelDescription, expert: Expert, mode: FakeTensorMode
) -> ExpertState:
    """The state of an expert in training, built as in a run, with fake tensors."""
    meta_precision = ComputePrecision(config.train.mixed_precision, torch.device("meta"))
    with MetaDeviceMode():
        module = family.load_denoiser(model, expert, expert_setup.weight_dtype(config, meta_precision))
        expert_setup.quantize_base_weights(config, module, meta_precision, NullSink())
        trained = expert_setup.build_trainable_expert(config, family, expert, module, meta_precision, NullSink())
    adapter_names = {id(parameter): name for name, parameter in trained.parameters.items()}
    names_in_module = {name: adapter_names.get(id(parameter)) for name, parameter in module.named_parameters()}
    fill_with_fake_tensors(module, mode, CPU)
    fakes = dict(module.named_parameters())
    parameters = {adapter_name: fakes[name] for name, adapter_name in names_in_module.items() if adapter_name}
    with mode:
        precision = ComputePrecision(config.train.mixed_precision, CPU)
        return expert_setup.build_expert_state(config, expert, replace(trained, parameters=parameters), precision)


def with_checkpointing(config: RunConfig, checkpointing: bool) -> RunConfig:
    """The configuration with another value of `train.gradient_checkpointing`."""
    train = config.train.model_copy(update={"gradient_checkpointing": checkpointing})
    return config.model_copy(update={"train": train})


def traceable_config(config: RunConfig) -> RunConfig:
    """The configuration without the settings that cannot run on fake tensors; they change no memory of the step."""
    model = config.model.model_copy(update={"compile": False, "attention": "native"})
    return config.model_copy(update={"model": model})


def _untraced_settings(config: RunConfig) -> tuple[str, ...]:
    """Notes on settings that a trace ignores."""
    notes = []
    if config.model.compile:
        notes.append("model.compile: traced without compilation; compiled blocks need less memory")
    if config.model.attention != "native":
        notes.append(f'model.attention "{config.model.attention}": traced with torch\'s own, which saves as much')
    return tuple(notes)


def fake_batch(shape: BatchShape) -> StepBatch:
    """A micro-batch of fake tensors."""

    def empty_tensors(specs: Mapping[str, BatchTensorSpec]) -> dict[str, torch.Tensor]:
        return {name: torch.empty(shape.samples, *one.shape, dtype=one.dtype) for name, one in specs.items()}

    latents = torch.empty(shape.samples, *shape.latents, dtype=shape.latents_dtype)
    return StepBatch(
        latents=latents,
        noise=torch.empty(latents.shape),
        sigmas=torch.empty(shape.samples),
        text=empty_tensors(shape.text),
        conditions=empty_tensors(shape.conditions),
        loss_inputs=empty_tensors(shape.loss_inputs),
    )


def register_optimizer_state(recorder: TraceRecorder, expert_state: ExpertState, prefix: str = "") -> None:
    """Registers optimizer state, EMA weights and prior weights. `prefix`: that of the module's names."""
    names = {id(parameter): name for name, parameter in expert_state.parameters.items()}
    for parameter, state in expert_state.optimizer.torch_optimizer.state.items():
        block_number = recorder.block_of_parameter(prefix + names.get(id(parameter), ""))
        for value in state.values():
            if isinstance(value, torch.Tensor):
                recorder.register_tensor(value, TensorKind.STATE, block_number)
    extra_values = [] if expert_state.ema is None else [expert_state.ema.averages]
    # With a prior, `base_weights` is a partial function whose second argument holds the values of the base weights.
    extra_values += getattr(expert_state.base_weights, "args", ())[1:]
    for values in extra_values:
        for name, value in values.items():
            recorder.register_tensor(value, TensorKind.STATE, recorder.block_of_parameter(prefix + name))
