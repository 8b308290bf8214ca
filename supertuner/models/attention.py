"""Checks and sets the attention backend of a run. A backend that cannot train here raises before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn
from torch import nn

from supertuner.config.sources.problems import closest_match
from supertuner.core.errors import ModelError
from supertuner.models.library_guards import quiet_libraries

ALIASES: Final[Mapping[str, str]] = {
    "sdpa": "native",
    "math": "_native_math",
    "cudnn": "_native_cudnn",
    **dict.fromkeys(("flash2", "flash_2", "flash_attn_2", "flash_attention_2"), "flash"),
    **dict.fromkeys(("flash_attn", "flash_attention"), "flash"),
    **dict.fromkeys(("flash3", "flash_3", "flash_attn_3", "flash_attention_3"), "_flash_3"),
    "flash_3_hub": "_flash_3_hub",
    "flex_attention": "flex",
    **dict.fromkeys(("sageattention", "sage_attention"), "sage"),
}
"""Other common names → the name in diffusers."""
PROBE_HEAD_DIM: Final = 128
"""The head dimension of the test in `require_backend`: that of Wan and Flux, which every backend supports."""


def require_backend(name: str, device: torch.device) -> None:
    """Raise ModelError if the backend is unknown, not installed, or cannot compute attention and its gradient here."""
    backend = _resolve_backend(name)
    query = torch.zeros(1, 16, 2, PROBE_HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=True)
    try:
        with attention_backend(backend):
            output = dispatch_attention_fn(query, query, query, backend=backend)
        if output.requires_grad:
            output.sum().backward()
    except (RuntimeError, ValueError, ImportError, TypeError, AssertionError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        problem = f"which cannot train on this machine ({device.type}): {reason}"
        raise ModelError(f'model.attention is {name!r}, {problem}; set model.attention: "native"') from error
    if query.grad is None:
        raise ModelError(f'model.attention is {name!r}, which computes no gradient; set model.attention: "native"')


def use_backend(module: nn.Module, name: str) -> None:
    """Set the backend of the module's attention layers. Other modules keep theirs."""
    backend = _resolve_backend(name)
    model: Any = module
    # set_attention_backend also changes the default of the whole process; the context restores it.
    with quiet_libraries(), attention_backend(AttentionBackendName.NATIVE):
        model.set_attention_backend(backend.value)


def require_backend_support(module: nn.Module, name: str) -> None:
    """Raise ModelError if the backend is not torch's own and no layer of the module supports others.

    Some models of diffusers ignore the choice without a warning.
    """
    if _resolve_backend(name) is AttentionBackendName.NATIVE:
        return
    processors = [layer.processor for layer in module.modules() if hasattr(layer, "processor")]
    if not any(hasattr(processor, "_attention_backend") for processor in processors):
        raise ModelError(
            f"model.attention is {name!r}, but diffusers' {type(module).__name__} supports only torch's own attention; "
            'set model.attention: "native"'
        )


def _resolve_backend(name: str) -> Any:
    known = [backend.value for backend in AttentionBackendName]
    normalized = name.lower().replace("-", "_")
    normalized = normalized if normalized in known else ALIASES.get(normalized, normalized)
    if normalized in known:
        return AttentionBackendName(normalized)
    guess = closest_match(normalized, [*known, *ALIASES])
    hint = f"did you mean {guess!r}?" if guess else f"use one of {', '.join(known)}"
    raise ModelError(f"model.attention is {name!r}, which diffusers does not have; {hint}")
