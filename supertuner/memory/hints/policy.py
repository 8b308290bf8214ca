"""What is asked for each tensor of a batch, by what it is: literal tables, and how its kind is read off its name.

Two policies. "seeds" is what the documents that this engine began from did: latents and sound belong to the host, text
and masks to the GPU. "default" is what the machine's rules suggest: whatever is in a batch is about to be read by the
GPU, so it is sent there; what should stay in host memory is the cache's copy, which is hinted where it is attached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Final, Literal, TypeAlias

import torch

Name: TypeAlias = Literal["default", "seeds"]


class Kind(StrEnum):
    """What a tensor of a batch is."""

    LATENTS = "latents"
    CONDITIONING = "conditioning"
    UNCONDITIONAL = "unconditional"
    TEXT = "text embeddings"
    POOLED = "pooled"
    MASKS = "masks"
    AUDIO_LATENTS = "audio latents"
    SAMPLES = "samples"
    WAVEFORMS = "waveforms"
    NOISE = "noise"
    LEVELS = "levels"
    OTHER = "other"
    """A name that no rule knows."""


class Hint(StrEnum):
    """What can be asked for a tensor."""

    PREFER_CPU = "prefer CPU"
    PREFER_GPU = "prefer GPU"
    PREFETCH = "prefetch"


TO_HOST: Final = (Hint.PREFER_CPU,)
TO_HOST_AND_FETCH: Final = (Hint.PREFER_CPU, Hint.PREFETCH)
TO_GPU: Final = (Hint.PREFER_GPU, Hint.PREFETCH)
FETCH: Final = (Hint.PREFETCH,)

POLICIES: Final[Mapping[Name, Mapping[Kind, tuple[Hint, ...]]]] = {
    "default": {
        Kind.LATENTS: FETCH,
        Kind.CONDITIONING: FETCH,
        Kind.UNCONDITIONAL: FETCH,
        Kind.TEXT: FETCH,
        Kind.POOLED: FETCH,
        Kind.MASKS: FETCH,
        Kind.AUDIO_LATENTS: FETCH,
        Kind.SAMPLES: FETCH,
        Kind.WAVEFORMS: FETCH,
        Kind.NOISE: FETCH,
        Kind.LEVELS: FETCH,
        Kind.OTHER: FETCH,
    },
    "seeds": {
        Kind.LATENTS: TO_HOST,
        Kind.CONDITIONING: TO_GPU,
        Kind.UNCONDITIONAL: TO_GPU,
        Kind.TEXT: TO_GPU,
        Kind.POOLED: TO_GPU,
        Kind.MASKS: TO_GPU,
        Kind.AUDIO_LATENTS: TO_HOST_AND_FETCH,
        Kind.SAMPLES: TO_HOST_AND_FETCH,
        Kind.WAVEFORMS: TO_HOST_AND_FETCH,
        Kind.NOISE: (),
        Kind.LEVELS: (),
        Kind.OTHER: FETCH,
    },
}
"""Kind of tensor → what is asked for it, in this order."""

WORDS: Final[tuple[tuple[Kind, tuple[str, ...]], ...]] = (
    (Kind.MASKS, ("mask",)),
    (Kind.UNCONDITIONAL, ("uncond", "negative")),
    (Kind.POOLED, ("pool", "add_text_embeds")),
    (Kind.CONDITIONING, ("condition", "control", "time_ids", "adapter_image", "clip_image")),
    (Kind.AUDIO_LATENTS, ("audio_latent", "audio.latent")),
    (Kind.WAVEFORMS, ("waveform", "audio", "wav")),
    (Kind.LATENTS, ("latent",)),
    (Kind.TEXT, ("embed", "encoder_hidden_states", "prompt", "text", "token")),
    (Kind.NOISE, ("noise",)),
    (Kind.LEVELS, ("timestep", "sigma", "level")),
    (Kind.SAMPLES, ("pixel", "image", "video", "sample", "frames")),
)
"""The first row with a word that is in the name (with those around it, as in `audio.latents`) tells the kind."""

ATTRIBUTES: Final = (
    "latents",
    "unconditional_latents",
    "audio_latents",
    "tensor",
    "control_tensor",
    "mask_tensor",
    "prompt_embeds",
    "text_embeds",
    "pooled_embeds",
    "attention_mask",
)
"""Where tensors are in objects of other trainers that are neither mappings nor dataclasses."""


def kind_named(name: str) -> Kind:
    """What a tensor is by its name; names of what it lies in stand before it, with a dot between."""
    lowered = name.lower()
    for kind in Kind:
        if lowered == kind.value:
            return kind
    for kind, words in WORDS:
        if any(word in lowered for word in words):
            return kind
    return Kind.OTHER


def tensors_in(batch: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a batch with its name: mappings, dataclasses, named tuples, lists, pairs of name and value."""
    if isinstance(batch, torch.Tensor):
        yield name, batch
        return
    for inner, value in _inside(batch):
        called = f"{name}.{inner}" if name and inner else inner or name
        if type(value) is torch.Tensor:  # most are: a generator for each would cost more than its hint
            yield called, value
        else:
            yield from tensors_in(value, called)


def _inside(batch: object) -> Iterable[tuple[str, object]]:
    """What lies in a container, with the name of each; empty where it has none. What is no container has nothing."""
    if isinstance(batch, Mapping):
        return [(key if isinstance(key, str) else str(key), value) for key, value in batch.items()]
    if isinstance(batch, (str, bytes, bytearray, int, float)) or batch is None:
        return ()
    if is_dataclass(batch) and not isinstance(batch, type):
        return [(one.name, getattr(batch, one.name)) for one in fields(batch)]
    if isinstance(batch, tuple):
        if hasattr(batch, "_fields"):
            return list(zip(batch._fields, batch, strict=True))
        if len(batch) == 2 and isinstance(batch[0], str):
            return [(batch[0], batch[1])]
    if isinstance(batch, (list, tuple, set, frozenset, Iterator)):
        return (("", value) for value in batch)
    found = getattr(batch, "__dict__", {})
    return [(name, found[name]) for name in ATTRIBUTES if name in found]
