"""What is asked for each tensor of a batch, by what it is: literal tables, and how its kind is read off its name.

Two policies. "seeds" is what the documents that this engine began from did: latents and sound belong to the host, text
and masks to the GPU. "default" is what the machine's rules suggest: whatever is in a batch is about to be read by the
GPU, so it is sent there; what should stay in host memory is the cache's copy, which is hinted where it is attached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

PolicyName: TypeAlias = Literal["default", "seeds"]


class BatchTensorKind(StrEnum):
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
    SIGMAS = "levels"
    OTHER = "other"
    """A name that no rule knows."""


class BatchHint(StrEnum):
    """What can be asked for a tensor."""

    PREFER_CPU = "prefer CPU"
    PREFER_GPU = "prefer GPU"
    PREFETCH = "prefetch"


TO_HOST: Final = (BatchHint.PREFER_CPU,)
TO_HOST_AND_FETCH: Final = (BatchHint.PREFER_CPU, BatchHint.PREFETCH)
TO_GPU: Final = (BatchHint.PREFER_GPU, BatchHint.PREFETCH)
FETCH: Final = (BatchHint.PREFETCH,)

POLICIES: Final[Mapping[PolicyName, Mapping[BatchTensorKind, tuple[BatchHint, ...]]]] = {
    "default": {
        BatchTensorKind.LATENTS: FETCH,
        BatchTensorKind.CONDITIONING: FETCH,
        BatchTensorKind.UNCONDITIONAL: FETCH,
        BatchTensorKind.TEXT: FETCH,
        BatchTensorKind.POOLED: FETCH,
        BatchTensorKind.MASKS: FETCH,
        BatchTensorKind.AUDIO_LATENTS: FETCH,
        BatchTensorKind.SAMPLES: FETCH,
        BatchTensorKind.WAVEFORMS: FETCH,
        BatchTensorKind.NOISE: FETCH,
        BatchTensorKind.SIGMAS: FETCH,
        BatchTensorKind.OTHER: FETCH,
    },
    "seeds": {
        BatchTensorKind.LATENTS: TO_HOST,
        BatchTensorKind.CONDITIONING: TO_GPU,
        BatchTensorKind.UNCONDITIONAL: TO_GPU,
        BatchTensorKind.TEXT: TO_GPU,
        BatchTensorKind.POOLED: TO_GPU,
        BatchTensorKind.MASKS: TO_GPU,
        BatchTensorKind.AUDIO_LATENTS: TO_HOST_AND_FETCH,
        BatchTensorKind.SAMPLES: TO_HOST_AND_FETCH,
        BatchTensorKind.WAVEFORMS: TO_HOST_AND_FETCH,
        BatchTensorKind.NOISE: (),
        BatchTensorKind.SIGMAS: (),
        BatchTensorKind.OTHER: FETCH,
    },
}
"""Kind of tensor → what is asked for it, in this order."""

KIND_WORDS: Final[tuple[tuple[BatchTensorKind, tuple[str, ...]], ...]] = (
    (BatchTensorKind.MASKS, ("mask",)),
    (BatchTensorKind.UNCONDITIONAL, ("uncond", "negative")),
    (BatchTensorKind.POOLED, ("pool", "add_text_embeds")),
    (BatchTensorKind.CONDITIONING, ("condition", "control", "time_ids", "adapter_image", "clip_image")),
    (BatchTensorKind.AUDIO_LATENTS, ("audio_latent", "audio.latent")),
    (BatchTensorKind.WAVEFORMS, ("waveform", "audio", "wav")),
    (BatchTensorKind.LATENTS, ("latent",)),
    (BatchTensorKind.TEXT, ("embed", "encoder_hidden_states", "prompt", "text", "token")),
    (BatchTensorKind.NOISE, ("noise",)),
    (BatchTensorKind.SIGMAS, ("timestep", "sigma", "level")),
    (BatchTensorKind.SAMPLES, ("pixel", "image", "video", "sample", "frames")),
)
"""The first row with a word that is in the name (with those around it, as in `audio.latents`) tells the kind."""

TENSOR_ATTRIBUTES: Final = (
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


def tensor_kind(name: str) -> BatchTensorKind:
    """What a tensor is by its name; names of what it lies in stand before it, with a dot between."""
    lowered = name.lower()
    for kind in BatchTensorKind:
        if lowered == kind.value:
            return kind
    for kind, words in KIND_WORDS:
        if any(word in lowered for word in words):
            return kind
    return BatchTensorKind.OTHER


def named_tensors(batch: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a batch with its name: mappings, dataclasses, named tuples, lists, pairs of name and value."""
    import torch

    if isinstance(batch, torch.Tensor):
        yield name, batch
        return
    for child_name, value in _children(batch):
        full_name = f"{name}.{child_name}" if name and child_name else child_name or name
        if type(value) is torch.Tensor:  # most are: a generator for each would cost more than its hint
            yield full_name, value
        else:
            yield from named_tensors(value, full_name)


def _children(batch: object) -> Iterable[tuple[str, object]]:
    """What lies in a container, with the name of each; empty where it has none. What is no container has nothing."""
    if isinstance(batch, Mapping):
        return [(key if isinstance(key, str) else str(key), value) for key, value in batch.items()]
    if isinstance(batch, (str, bytes, bytearray, int, float)) or batch is None:
        return ()
    if is_dataclass(batch) and not isinstance(batch, type):
        return [(attribute.name, getattr(batch, attribute.name)) for attribute in fields(batch)]
    if isinstance(batch, tuple):
        if hasattr(batch, "_fields"):
            return list(zip(batch._fields, batch, strict=True))
        if len(batch) == 2 and isinstance(batch[0], str):
            return [(batch[0], batch[1])]
    if isinstance(batch, (list, tuple, set, frozenset, Iterator)):
        return (("", value) for value in batch)
    attributes = getattr(batch, "__dict__", {})
    return [(name, attributes[name]) for name in TENSOR_ATTRIBUTES if name in attributes]
