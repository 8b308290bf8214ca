"""What is trained, made from an expert's module by the settings alone: for a run and for the forecast of it alike.

Whoever has the module decides where its weights come from: a run loads them, a trace has none. From there on both go
this one way, so that what was forecast is what runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import TrainError
from supertuner.core.events import DecisionEvent, NoteEvent, Sink
from supertuner.models.adapters import attach as adapters
from supertuner.models.attention import use_backend
from supertuner.models.block_compilation import compile_blocks
from supertuner.models.objective import loss_weighting as weighting
from supertuner.models.objective.diffusion import TrainingObjective
from supertuner.models.quantization import quantize_blocks
from supertuner.models.spec import Expert, Family, ModelDescription
from supertuner.optim import optimizer_registry as optimizers
from supertuner.optim.ema import EmaWeights
from supertuner.step.precision import ComputePrecision
from supertuner.step.window import ExpertState, StepOptions, prepare_for_training


def selected_experts(config: RunConfig, model: ModelDescription) -> tuple[Expert, ...]:
    """The experts that are trained."""
    requested = config.model.experts
    selected = tuple(expert for expert in model.experts if requested in ("all", expert.name))
    if not selected:
        available = ", ".join(expert.name for expert in model.experts)
        raise TrainError(f'model.experts is "{requested}", and {model.title} has {available}; use "all"')
    return selected


def weight_dtype(config: RunConfig, precision: ComputePrecision) -> torch.dtype:
    """What an expert's weights are loaded in: what is trained is fp32."""
    return torch.float32 if config.adapter.type == "full" else precision.dtype


def quantize_base_weights(config: RunConfig, module: nn.Module, precision: ComputePrecision, sink: Sink) -> None:
    """Weights that are not trained, in the number format that the settings name; before adapters are put on them."""
    if config.model.base_weights != "as_computed":
        sink.emit(quantize_blocks(module, config.model.base_weights, precision.device))


def build_trainable_expert(
    config: RunConfig,
    family: Family,
    expert: Expert,
    module: nn.Module,
    precision: ComputePrecision,
    sink: Sink,
    place_optimizer_state: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> adapters.TrainableExpert:
    """What is trained of an expert's module, which is made ready for its first window."""
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
    config: RunConfig, expert: Expert, trainable: adapters.TrainableExpert, precision: ComputePrecision
) -> ExpertState:
    """What is trained, with its optimizer and its average."""
    parameters = dict(trainable.parameters)
    decay = config.train.ema_decay
    base_weights = None
    if any(dataset.prior for dataset in config.datasets):
        # As adapters begin, so was the model: the values of now are what keeps the prior, after a resume too.
        initial_values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        base_weights = partial(adapters.temporary_weights, trainable, initial_values)
    return ExpertState(
        expert=expert,
        module=trainable.module,
        parameters=parameters,
        optimizer=optimizers.build_optimizer(config.optimizer, parameters, expert.name, seed=config.run.seed),
        ema=None if decay is None else EmaWeights(parameters, decay),
        loss_scaler=precision.scaler(),
        base_weights=base_weights,
    )


def build_objective(config: RunConfig, family: Family, model: ModelDescription, sink: Sink) -> TrainingObjective:
    """What the model learns, on the table that it was trained on if it has one."""
    table = None if model.alphas_cumprod is None else torch.tensor(model.alphas_cumprod, dtype=torch.float32)
    objective = weighting.objective_from_settings(config.objective, model.prediction or family.prediction, table)
    for decision in weighting.weighting_decisions(config.objective, objective):
        sink.emit(decision)
    return objective


def build_step_options(
    config: RunConfig,
    family: Family,
    model: ModelDescription,
    precision: ComputePrecision,
    sink: Sink,
    place_optimizer_state: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> StepOptions:
    """What is the same in every window of the run."""
    return StepOptions(
        denoise=partial(family.denoise, model),
        objective=build_objective(config, family, model, sink),
        precision=precision,
        max_grad_norm=config.train.max_grad_norm,
        place_optimizer_state=place_optimizer_state,
    )
