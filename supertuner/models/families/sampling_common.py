"""Helpers for the samplers of all families: pipeline components, and denoisers that compute as in training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from supertuner.core.errors import ModelError
from supertuner.models import loading
from supertuner.models.spec import ModelDescription, SampleRequest


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
            components[name] = loading.load_module(model, name, torch.float32 if name == "vae" else dtype).to(device)
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
