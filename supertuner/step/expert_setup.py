"""Builds an expert for training from its module and the settings, in the same way for a run and for its forecast.

A run passes a module with loaded weights, a trace one without weights. From there on both use these functions, so that
the forecast describes what the run does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal

import torch
from torch import nn

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import TrainError
from supertuner.core.events import DecisionEvent, NoteEvent, Sink
from supertuner.models import loading
from supertuner.models.adapters import attach as adapters
from supertuner.models.adapters.attach import TrainableExpert
from supertuner.models.attention import use_backend
from supertuner.models.block_compilation import compile_blocks
from supertuner.models.objective.from_settings import (
    build_objective,
    guidance_decisions,
    weighting_decisions,
    with_training_guidance,
)
from supertuner.models.quantization import LayerFunction, QuantizedLinear, quantize_blocks
from supertuner.models.spec import Expert, Family, ModelDescription
from supertuner.optim.ema import EmaWeights
from supertuner.optim.optimizer_registry import build_optimizer
from supertuner.step.precision import ComputePrecision
from supertuner.step.train_step import ExpertState, StepOptions, prepare_for_training


def selected_experts(config: RunConfig, model: ModelDescription) -> tuple[Expert, ...]:
    """The experts that `model.experts` selects. Raises TrainError if the model has no such expert."""
    requested = config.model.experts
    selected = tuple(expert for expert in model.experts if requested in ("all", expert.name))
    if not selected:
        available = ", ".join(expert.name for expert in model.experts)
        raise TrainError(f'model.experts is "{requested}", but the experts of {model.title} are {available}; use "all"')
    return selected


def weight_dtype(config: RunConfig, precision: ComputePrecision) -> torch.dtype:
    """The format to load an expert's weights in: fp32 if they are trained, otherwise the format of computation."""
    return torch.float32 if config.adapter.type == "full" else precision.dtype


def quantize_base_weights(config: RunConfig, module: nn.Module, precision: ComputePrecision, sink: Sink) -> None:
    """Quantize weights that are not trained as `model.base_weights` says, in place. Call before attaching adapters."""
    if config.model.base_weights != "as_computed":
        sink.emit(quantize_blocks(module, config.model.base_weights, precision.device))


def place_base_weights(
    module: nn.Module,
    kind: Literal["as_computed", "int8", "fp8"],
    device: torch.device,
    sink: Sink,
    *,
    compute_device: torch.device | None = None,
    change_layer: LayerFunction | None = None,
) -> None:
    """Copy a loaded module to `device`, and quantize its weights as `model.base_weights` (`kind`) says, layer by layer.

    The whole module is never there in 16 bits. `change_layer` may change a layer on the device before it is quantized.
    `compute_device`: where the layers will compute, if it is another device. Call before attaching adapters.
    """

    def prepare(name: str, part: nn.Module) -> None:
        loading.place_tensors(part, device, recurse=False)
        if change_layer is not None:
            change_layer(name, part)

    if kind != "as_computed":
        sink.emit(quantize_blocks(module, kind, compute_device or device, prepare))
    for name, part in module.named_modules():
        if not isinstance(part, QuantizedLinear):
            prepare(name, part)


def build_trainable_expert(
    config: RunConfig,
    family: Family,
    expert: Expert,
    module: nn.Module,
    precision: ComputePrecision,
    sink: Sink,
    place_optimizer_state: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> TrainableExpert:
    """Attach the adapter (or select all weights) and prepare the module for its first window."""
    settings = adapters.settings_for_expert(config.adapter, expert.name)
    use_backend(module, config.model.attention)
    targets = adapters.resolve_targets(settings, family.target_presets)
    with place_optimizer_state():
        trainable = adapters.attach(module, settings, targets, seed=config.run.seed, name=expert.name)
    prepare_for_training(module, config.train.gradient_checkpointing)
    if config.model.compile:
        sink.emit(compile_blocks(module, precision.device))
    count = sum(parameter.numel() for parameter in trainable.parameters.values())
    sink.emit(DecisionEvent(f"trained.{expert.name}", count, f"parameters of {settings.type} on {expert.component}"))
    if trainable.note is not None:
        sink.emit(NoteEvent(f"trained.{expert.name}", trainable.note))
    return trainable


def build_expert_state(
    config: RunConfig, expert: Expert, trainable: TrainableExpert, precision: ComputePrecision
) -> ExpertState:
    """The trainable expert with its optimizer, moving average and loss scaler."""
    parameters = dict(trainable.parameters)
    decay = config.train.ema_decay
    base_weights = None
    if any(dataset.prior for dataset in config.datasets):
        # At this point the adapter still has its initial values, with which the module computes like the untrained
        # model. Prior preservation uses these values, also after a resume.
        initial_values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        base_weights = partial(adapters.temporary_weights, trainable, initial_values)
    return ExpertState(
        expert=expert,
        module=trainable.module,
        parameters=parameters,
        optimizer=build_optimizer(config.optimizer, parameters, expert.name, seed=config.run.seed),
        ema=None if decay is None else EmaWeights(parameters, decay),
        loss_scaler=precision.scaler(),
        base_weights=base_weights,
    )


def build_step_options(
    config: RunConfig,
    family: Family,
    model: ModelDescription,
    precision: ComputePrecision,
    sink: Sink,
    place_optimizer_state: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> StepOptions:
    """The options that are the same in every window of the run. Reports settings that have no effect to `sink`."""
    objective = build_objective(config.objective, family, model)
    for decision in (*weighting_decisions(config.objective, objective), *guidance_decisions(config.objective, model)):
        sink.emit(decision)
    return StepOptions(
        denoise=partial(family.denoise, with_training_guidance(config.objective, model)),
        objective=objective,
        precision=precision,
        max_grad_norm=config.train.max_grad_norm,
        max_grad_value=config.train.max_grad_value,
        place_optimizer_state=place_optimizer_state,
    )
