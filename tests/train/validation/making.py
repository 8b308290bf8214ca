"""A tiny Wan2.2 with two experts in training, and its sampler."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from supertuner.config.settings.model import AdapterSettings
from supertuner.config.settings.optim import OptimizerSettings
from supertuner.core.events import Event
from supertuner.models.adapters.attach import TrainableExpert, attach
from supertuner.models.family_loader import load_family
from supertuner.models.objective.diffusion import TrainingObjective
from supertuner.models.spec import ModelDescription, ModelSampler, ModelSource
from supertuner.optim.ema import EmaWeights
from supertuner.optim.optimizer_registry import build_optimizer
from supertuner.plan.sample_requests import SampleSize, ValidationSamplePlan
from supertuner.step.precision import ComputePrecision
from supertuner.step.train_step import ExpertState, StepOptions, prepare_for_training, train_window
from tests.step.step_builders import build_wan_batch

CPU = torch.device("cpu")


class RecordingSink:
    """A sink that records events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event, /) -> None:
        self.events.append(event)


@dataclass(eq=False)
class TrainingStub:
    model: ModelDescription
    step_options: StepOptions
    expert_states: tuple[ExpertState, ...]
    trainable_experts: dict[str, TrainableExpert]
    sampler: ModelSampler

    def window(self, number: int) -> float:
        """Train one window of two samples. Dropout uses torch's global generator, on purpose."""
        expert_state = self.expert_states[number % len(self.expert_states)]
        batch = build_wan_batch([2 * number, 2 * number + 1], 4)
        return train_window(expert_state, [batch], samples=2, learning_rate=1e-2, options=self.step_options).loss

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of everything that a window changes."""
        found = {}
        for expert_state in self.expert_states:
            for name, parameter in expert_state.parameters.items():
                found[f"{expert_state.expert.name}.{name}"] = parameter.detach().clone()
            if expert_state.ema is not None:
                found |= {
                    f"{expert_state.expert.name}.ema.{n}": a.clone() for n, a in expert_state.ema.averages.items()
                }
        return found


def training(
    source: ModelSource, *, optimizer: str = "adamw", ema: float | None = None, dropout: float = 0.25
) -> TrainingStub:
    """Both experts with LoRA and gradient checkpointing, and a pipeline with their modules."""
    wan = load_family("wan2.2")
    model = wan.read_model(source)
    trained = {}
    for expert in model.experts:
        module = wan.load_denoiser(model, expert, torch.float32)
        settings = AdapterSettings(rank=2, dropout=dropout)
        trained[expert.name] = attach(module, settings, wan.target_presets["attention"], seed=1, name=expert.name)
        prepare_for_training(module, checkpointing=True)
    expert_states = []
    for expert in model.experts:
        parameters = dict(trained[expert.name].parameters)
        made = build_optimizer(OptimizerSettings.model_validate({"name": optimizer}), parameters, expert.name)
        module = trained[expert.name].module
        expert_states.append(
            ExpertState(expert, module, parameters, made, None if ema is None else EmaWeights(parameters, ema))
        )
    options = StepOptions(partial(wan.denoise, model), TrainingObjective(), ComputePrecision("fp32", CPU))
    modules = {expert.component: trained[expert.name].module for expert in model.experts}
    return TrainingStub(
        model, options, tuple(expert_states), trained, wan.build_sampler(model, modules, CPU, torch.float32)
    )


def a_plan(*prompts: str, seeds: tuple[int, ...] = (0,), frames: int = 1, steps: int = 2) -> ValidationSamplePlan:
    return ValidationSamplePlan(
        prompts=prompts or ("a red circle",),
        images=(None,) * (len(prompts) or 1),
        seeds=seeds,
        size=SampleSize(32, 32, frames),
        fps=8.0,
        negative_prompt="",
        inference_steps=steps,
        guidance_scale=2.0,
    )
