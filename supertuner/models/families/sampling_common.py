"""Samples through a model's diffusers pipeline, with denoisers that compute as in training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import diffusers
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from supertuner.core.errors import ModelError
from supertuner.core.types import MediaKind
from supertuner.models import loading
from supertuner.models.spec import ModelDescription, SampleRequest

ShapeCheck: TypeAlias = Callable[[ModelDescription, tuple[int, ...]], str | None]
"""(model, shape of media) → why the model cannot take them, or None."""


@dataclass(frozen=True, eq=False, slots=True)
class PipelineOptions:
    """What differs between the pipelines that `build_sampler` uses."""

    unsupported_reason: ShapeCheck
    """The family's function of that name."""
    call_arguments: Callable[[ModelDescription, SampleRequest], Mapping[str, Any]]
    """Arguments of the pipeline's call beside those that every pipeline takes."""
    output_pixels: Callable[[Any, Any, SampleRequest], NDArray[np.floating[Any]]]
    """(pipeline, its output, request) → the frames FHWC of the sample, in [0, 1]."""
    constructor_arguments: Callable[[ModelDescription], Mapping[str, Any]] = lambda _model: {}
    """Arguments of the pipeline's constructor beside its components."""


@dataclass(frozen=True, eq=False, slots=True)
class PipelineSampler:
    """Samples through the model's diffusers pipeline."""

    model: ModelDescription
    pipeline: Any
    options: PipelineOptions
    device: torch.device
    dtype: torch.dtype

    @torch.no_grad()
    def sample(self, request: SampleRequest) -> NDArray[np.uint8]:
        problem = request_problem(self.model, request, self.options.unsupported_reason)
        require_possible(request, problem or too_few_steps_reason(self.pipeline.scheduler, request))
        denoisers = [getattr(self.pipeline, expert.component) for expert in self.model.experts]
        with eval_with_autocast(denoisers, self.device, self.dtype):
            output = self.pipeline(
                prompt=request.prompt,
                height=request.height,
                width=request.width,
                num_inference_steps=request.inference_steps,
                generator=torch.Generator().manual_seed(request.seed),
                **self.options.call_arguments(self.model, request),
            )
        return to_uint8(self.options.output_pixels(self.pipeline, output, request))


def build_sampler(
    model: ModelDescription,
    modules: Mapping[str, nn.Module],
    device: torch.device,
    dtype: torch.dtype,
    options: PipelineOptions,
) -> PipelineSampler:
    """A sampler around `modules`, with the pipeline class that the model's index names; other components are loaded."""
    pipeline_class = getattr(diffusers, str(model.configs[""]["_class_name"]))
    components = pipeline_components(model, modules, device, dtype)
    pipeline = pipeline_class(**components, **options.constructor_arguments(model))
    pipeline.set_progress_bar_config(disable=True)
    return PipelineSampler(model, pipeline, options, device, dtype)


def request_problem(model: ModelDescription, request: SampleRequest, unsupported_reason: ShapeCheck) -> str | None:
    """Why the requested sample does not have a size that the model takes; None if it has."""
    if MediaKind.VIDEO in model.media_kinds:
        return unsupported_reason(model, (3, request.frames, request.height, request.width))
    if request.frames != 1:
        return f"it has {request.frames} frames, and this model generates single images; set frames to 1"
    return unsupported_reason(model, (3, request.height, request.width))


def too_few_steps_reason(scheduler: Any, request: SampleRequest) -> str | None:
    """A scheduler with `shift_terminal` moves its last sigma there and scales the others, which needs at least two."""
    if request.inference_steps > 1 or not scheduler.config.get("shift_terminal"):
        return None
    return f"inference_steps is {request.inference_steps}, and this model's scheduler needs at least 2"


def pipeline_components(
    model: ModelDescription, modules: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Every component whose config the model holds: from `modules` if it is there, otherwise loaded.

    A loaded VAE computes in fp32, other loaded modules in `dtype`.
    """
    components: dict[str, Any] = {}
    for name in model.configs:
        if name in modules:
            components[name] = modules[name]
        elif name.startswith(("tokenizer", "scheduler")):
            components[name] = loading.load_tokenizer_or_scheduler(model, name)
        elif name:  # "" is the pipeline's own config
            number_format = torch.float32 if name == "vae" else dtype
            components[name] = loading.load_module(model, name, number_format, loading.to_device(device))
    return components


def require_possible(request: SampleRequest, reason: str | None) -> None:
    """Raise ModelError if there is a reason why this sample cannot be generated."""
    if reason:
        raise ModelError(f"the sample {request.prompt!r} cannot be generated: {reason}")


@contextmanager
def eval_with_autocast(modules: Iterable[nn.Module], device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Inside the block, these modules are in eval mode and run their forward pass under autocast (in fp32 without).

    Only these modules: a scheduler or a VAE that the pipeline calls in between keeps its own precision.
    """
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(_eval_mode(module))
            if dtype != torch.float32:
                stack.enter_context(_forward_autocast(module, device, dtype))
        yield


def to_uint8(pixels: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """Pixels in [0, 1] as bytes, rounded as diffusers rounds images."""
    return (pixels * 255).round().astype(np.uint8)


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    training_modules = [submodule for submodule in module.modules() if submodule.training]
    module.eval()
    try:
        yield
    finally:
        for submodule in training_modules:
            submodule.training = True


@contextmanager
def _forward_autocast(module: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    contexts: list[AbstractContextManager[Any]] = []

    def enter(_module: nn.Module, _inputs: Any) -> None:
        contexts.append(torch.autocast(device.type, dtype))
        contexts[-1].__enter__()

    def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    before = module.register_forward_pre_hook(enter)
    after = module.register_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()
