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

from supertuner.config.settings.tree import RunConfig
from supertuner.core.errors import TrainError
from supertuner.core.events import Decided, Noted, Sink
from supertuner.models.adapters import attach as adapters
from supertuner.models.attention import use_backend
from supertuner.models.compiled import compile_blocks
from supertuner.models.objective import loss_weighting as weighting
from supertuner.models.objective.diffusion import Objective
from supertuner.models.quantise import quantise
from supertuner.models.spec import Expert, Family, Model
from supertuner.optim import table as optimizers
from supertuner.optim.ema import Ema
from supertuner.step.precision import Precision
from supertuner.step.window import Rules, Trainee, prepare


def experts_of(config: RunConfig, model: Model) -> tuple[Expert, ...]:
    """The experts that are trained."""
    wanted = config.model.experts
    found = tuple(expert for expert in model.experts if wanted in ("all", expert.name))
    if not found:
        there = ", ".join(expert.name for expert in model.experts)
        raise TrainError(f'model.experts is "{wanted}", and {model.title} has {there}; use "all"')
    return found


def weight_format(config: RunConfig, precision: Precision) -> torch.dtype:
    """What an expert's weights are loaded in: what is trained is fp32."""
    return torch.float32 if config.adapter.type == "full" else precision.dtype


def store_base(config: RunConfig, module: nn.Module, precision: Precision, sink: Sink) -> None:
    """Weights that are not trained, in the number format that the settings name; before adapters are put on them."""
    if config.model.base_weights != "as_computed":
        sink.emit(quantise(module, config.model.base_weights, precision.device))


def trained_of(
    config: RunConfig,
    family: Family,
    expert: Expert,
    module: nn.Module,
    precision: Precision,
    sink: Sink,
    placing_state: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> adapters.Trained:
    """What is trained of an expert's module, which is made ready for its first window."""
    settings = adapters.for_expert(config.adapter, expert.name)
    use_backend(module, config.model.attention)
    targets = adapters.targets_of(settings, family.targets)
    with placing_state():
        trained = adapters.attach(module, settings, targets, seed=config.run.seed, name=expert.name)
    prepare(module, config.train.gradient_checkpointing)
    if config.model.compile:
        sink.emit(compile_blocks(module, precision.device))
    count = sum(parameter.numel() for parameter in trained.parameters.values())
    sink.emit(Decided(f"trained.{expert.name}", count, f"parameters of {settings.type} on {expert.part}"))
    if trained.remark is not None:
        sink.emit(Noted(f"trained.{expert.name}", trained.remark))
    return trained


def trainee_of(config: RunConfig, expert: Expert, trained: adapters.Trained, precision: Precision) -> Trainee:
    """What is trained, with its optimizer and its average."""
    parameters = dict(trained.parameters)
    decay = config.train.ema_decay
    untrained = None
    if any(dataset.prior for dataset in config.datasets):
        # As adapters begin, so was the model: the values of now are what keeps the prior, after a resume too.
        now = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        untrained = partial(adapters.applied, trained, now)
    return Trainee(
        expert=expert,
        module=trained.module,
        parameters=parameters,
        optimizer=optimizers.build(config.optimizer, parameters, expert.name, seed=config.run.seed),
        ema=None if decay is None else Ema(parameters, decay),
        scaler=precision.scaler(),
        untrained=untrained,
    )


def objective_of(config: RunConfig, family: Family, model: Model, sink: Sink) -> Objective:
    """What the model learns, on the table that it was trained on if it has one."""
    table = None if model.alphas_cumprod is None else torch.tensor(model.alphas_cumprod, dtype=torch.float32)
    objective = weighting.counted(config.objective, model.prediction or family.prediction, table)
    for decision in weighting.told(config.objective, objective):
        sink.emit(decision)
    return objective


def rules_of(
    config: RunConfig,
    family: Family,
    model: Model,
    precision: Precision,
    sink: Sink,
    placing_state: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Rules:
    """What is the same in every window of the run."""
    return Rules(
        denoise=partial(family.denoise, model),
        objective=objective_of(config, family, model, sink),
        precision=precision,
        max_grad_norm=config.train.max_grad_norm,
        placing_state=placing_state,
    )
