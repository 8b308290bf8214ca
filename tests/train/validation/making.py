"""A tiny two-expert Wan2.2 in training, with its sampler: what these tests look at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from supertuner.config.settings.model import AdapterSettings
from supertuner.config.settings.optim import OptimizerSettings
from supertuner.core.events import Event
from supertuner.models.adapters.attach import Trained, attach
from supertuner.models.objective.diffusion import Objective
from supertuner.models.spec import Model, Sampler, Source
from supertuner.models.table import family
from supertuner.optim.ema import Ema
from supertuner.optim.table import build
from supertuner.plan.sample_requests import SamplePlan, Size
from supertuner.step.precision import Precision
from supertuner.step.window import Rules, Trainee, prepare, train_window
from tests.step.making import wan_batch

CPU = torch.device("cpu")


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event, /) -> None:
        self.events.append(event)


@dataclass(eq=False)
class Training:
    model: Model
    rules: Rules
    trainees: tuple[Trainee, ...]
    trained: dict[str, Trained]
    sampler: Sampler

    def window(self, number: int) -> float:
        """Train one window of two samples. Dropout draws on torch's global generator, on purpose."""
        trainee = self.trainees[number % len(self.trainees)]
        batch = wan_batch([2 * number, 2 * number + 1], 4)
        return train_window(trainee, [batch], samples=2, rate=1e-2, rules=self.rules).loss

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of everything that a window changes."""
        found = {}
        for trainee in self.trainees:
            for name, parameter in trainee.parameters.items():
                found[f"{trainee.expert.name}.{name}"] = parameter.detach().clone()
            if trainee.ema is not None:
                found |= {f"{trainee.expert.name}.ema.{n}": a.clone() for n, a in trainee.ema.averages.items()}
        return found


def training(source: Source, *, optimizer: str = "adamw", ema: float | None = None, dropout: float = 0.25) -> Training:
    """Both experts with LoRA, recomputing activations, and the pipeline around their modules."""
    wan = family("wan2.2")
    model = wan.read(source)
    trained = {}
    for expert in model.experts:
        module = wan.denoiser(model, expert, torch.float32)
        settings = AdapterSettings(rank=2, dropout=dropout)
        trained[expert.name] = attach(module, settings, wan.targets["attention"], seed=1, name=expert.name)
        prepare(module, checkpointing=True)
    trainees = []
    for expert in model.experts:
        parameters = dict(trained[expert.name].parameters)
        made = build(OptimizerSettings.model_validate({"name": optimizer}), parameters, expert.name)
        module = trained[expert.name].module
        trainees.append(Trainee(expert, module, parameters, made, None if ema is None else Ema(parameters, ema)))
    rules = Rules(partial(wan.denoise, model), Objective(), Precision("fp32", CPU))
    modules = {expert.part: trained[expert.name].module for expert in model.experts}
    return Training(model, rules, tuple(trainees), trained, wan.sampler(model, modules, CPU, torch.float32))


def a_plan(*prompts: str, seeds: tuple[int, ...] = (0,), frames: int = 1, steps: int = 2) -> SamplePlan:
    return SamplePlan(
        prompts=prompts or ("a red circle",),
        images=(None,) * (len(prompts) or 1),
        seeds=seeds,
        size=Size(32, 32, frames),
        fps=8.0,
        negative_prompt="",
        inference_steps=steps,
        guidance_scale=2.0,
    )
