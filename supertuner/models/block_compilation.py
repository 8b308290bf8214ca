"""Compiles the blocks of a model in place with torch.compile, after a test of the compiler on a small function."""

from __future__ import annotations

import torch
from torch import nn

from supertuner.core.errors import ModelError
from supertuner.core.events import DecisionEvent


def compile_blocks(module: nn.Module, device: torch.device) -> DecisionEvent:
    """Compile each repeated block of `module`, after adapters are attached. Names and parameters do not change.

    Compiling block by block takes the time of one block: equal blocks share the compiled code.
    """
    blocks = repeated_blocks(module)
    if not blocks:
        raise ModelError(f"model.compile: {type(module).__name__} has no repeated blocks; set model.compile: false")
    check_compiler(device)
    for block in blocks:
        block.compile()
    kinds = sorted({type(block).__name__ for block in blocks})
    return DecisionEvent("model.compile", True, f"{', '.join(kinds)} × {len(blocks)}, compiled when first used")


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks that the model's class names for regional compilation in diffusers, or else those in module lists."""
    class_names = getattr(module, "_repeated_blocks", None)
    if class_names:
        return [block for block in module.modules() if type(block).__name__ in class_names]
    return [block for part in module.children() if isinstance(part, nn.ModuleList) for block in part]


def check_compiler(device: torch.device) -> None:
    """Compile and run a small function on `device`. Raises ModelError with the cause and the remedy if that fails."""
    inputs = torch.ones(64, device=device)
    try:
        output = torch.compile(_probe_function, fullgraph=True)(inputs)
    except Exception as error:
        cause = getattr(error, "inner_exception", error)  # dynamo's own message only says that the backend failed
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise ModelError(
            f"model.compile is true, but torch.compile does not work on {device.type} here: {reason}; install a C++ "
            "compiler (g++; for a GPU also triton), or set model.compile: false"
        ) from error
    if not torch.equal(output, _probe_function(inputs)):
        raise ModelError(f"model.compile: the result on {device.type} is wrong; set model.compile: false")


def _probe_function(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1
