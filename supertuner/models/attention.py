"""The attention backend that a run names: known, installed and able to train here, or refused before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn
from torch import nn

from supertuner.config.sources.problems import closest_match
from supertuner.core.errors import ModelError
from supertuner.models.library_logging import quiet_libraries

ALIASES: Final[Mapping[str, str]] = {
    "sdpa": "native",
    "math": "_native_math",
    "cudnn": "_native_cudnn",
    "flash2": "flash",
    "flash_2": "flash",
    "flash_attn": "flash",
    "flash_attn_2": "flash",
    "flash_attention": "flash",
    "flash_attention_2": "flash",
    "flash3": "_flash_3",
    "flash_3": "_flash_3",
    "flash_attn_3": "_flash_3",
    "flash_attention_3": "_flash_3",
    "flash_3_hub": "_flash_3_hub",
    "flex_attention": "flex",
    "sageattention": "sage",
    "sage_attention": "sage",
}
"""What people call them elsewhere → their name in diffusers."""
PROBE_HEAD_DIM: Final = 128
"""Of the probe: what Wan and Flux have, and every backend takes."""


def require_backend(name: str, device: torch.device) -> None:
    """Raise if the backend is unknown, is not installed, or computes no attention or no gradient on this device."""
    backend = _resolve_backend(name)
    query = torch.zeros(1, 16, 2, PROBE_HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=True)
    try:
        with attention_backend(backend):
            output = dispatch_attention_fn(query, query, query, backend=backend)
        if output.requires_grad:
            output.sum().backward()
    except (RuntimeError, ValueError, ImportError, TypeError, AssertionError, OSError) as error:
        reason_lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"model.attention is {name!r}, which cannot train on this machine ({device.type}): {reason_lines[0]} "
            '"native" always can'
        ) from error
    if query.grad is None:
        raise ModelError(f"model.attention is {name!r}: it computes no gradient, so nothing can be trained through it")


def use_backend(module: nn.Module, name: str) -> None:
    """Have the module's attention computed by this backend; other modules keep theirs."""
    backend = _resolve_backend(name)
    model: Any = module
    # set_attention_backend also changes the default of the whole process; the context puts that back.
    with quiet_libraries(), attention_backend(AttentionBackendName.NATIVE):
        model.set_attention_backend(backend.value)


def require_backend_support(module: nn.Module, name: str) -> None:
    """Raise if a backend other than torch's own is asked for and no layer of the module would follow: diffusers takes
    the choice without a word, and the layers of some models know nothing of it."""
    if _resolve_backend(name) is AttentionBackendName.NATIVE:
        return
    processors = [layer.processor for layer in module.modules() if hasattr(layer, "processor")]
    if not any(hasattr(processor, "_attention_backend") for processor in processors):
        raise ModelError(
            f"model.attention is {name!r}, and diffusers' {type(module).__name__} always computes attention by torch's "
            'own function; set it to "native"'
        )


def _resolve_backend(name: str) -> Any:
    known = [backend.value for backend in AttentionBackendName]
    normalized = name.lower().replace("-", "_")
    normalized = normalized if normalized in known else ALIASES.get(normalized, normalized)
    if normalized in known:
        return AttentionBackendName(normalized)
    guess = closest_match(normalized, [*known, *ALIASES])
    hint = f"did you mean {guess!r}?" if guess else f"there are {', '.join(known)}"
    raise ModelError(f"model.attention is {name!r}, which diffusers does not have; {hint}")
