"""Which hints each tensor of a batch receives, by its kind: literal tables, and how the kind follows from the tensor's
name.

There are two policies. "forks" is what the GH200 forks did: latents and audio stay in host memory, text and masks go to
the GPU. "default" follows from the rules of the machine: the GPU is about to read every tensor of a batch, so all are
prefetched; what should stay in host memory is the cache's copy, which is hinted where it is attached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

PolicyName: TypeAlias = Literal["default", "forks"]


class BatchTensorKind(StrEnum):
    """The kind of a tensor in a batch."""

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
    """No rule matches the name."""


class BatchHint(StrEnum):
    """The hints of a policy."""

    PREFER_CPU = "prefer CPU"
    PREFER_GPU = "prefer GPU"
    PREFETCH = "prefetch"


TO_HOST: Final = (BatchHint.PREFER_CPU,)
TO_HOST_AND_FETCH: Final = (BatchHint.PREFER_CPU, BatchHint.PREFETCH)
TO_GPU: Final = (BatchHint.PREFER_GPU, BatchHint.PREFETCH)
FETCH: Final = (BatchHint.PREFETCH,)

POLICIES: Final[Mapping[PolicyName, Mapping[BatchTensorKind, tuple[BatchHint, ...]]]] = {
    "default": dict.fromkeys(BatchTensorKind, FETCH),
    "forks": {
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
"""Kind of tensor → its hints, in this order."""

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
"""The first row with a word that occurs in the full name (such as `audio.latents`) determines the kind."""

TENSOR_ATTRIBUTES: Final = (
    "latents", "unconditional_latents", "audio_latents", "tensor", "control_tensor", "mask_tensor", "prompt_embeds",
    "text_embeds", "pooled_embeds", "attention_mask",
)  # fmt: skip
"""Attributes that hold tensors in other trainers' batch objects that are neither mappings nor dataclasses."""


def tensor_kind(name: str) -> BatchTensorKind:
    """The kind of a tensor by its full name, which contains the names of its containers, separated by dots."""
    lowered = name.lower()
    if lowered in tuple(BatchTensorKind):
        return BatchTensorKind(lowered)
    matches = (kind for kind, words in KIND_WORDS if any(word in lowered for word in words))
    return next(matches, BatchTensorKind.OTHER)


def named_tensors(batch: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a batch with its full name. Containers: mappings, dataclasses, named tuples, lists, (name, value)
    pairs.
    """
    import torch

    if isinstance(batch, torch.Tensor):
        yield name, batch
        return
    for child_name, value in _children(batch):
        full_name = f"{name}.{child_name}" if name and child_name else child_name or name
        if type(value) is torch.Tensor:  # the common case: a generator per tensor would take longer than its hint
            yield full_name, value
        else:
            yield from named_tensors(value, full_name)


def _children(batch: object) -> Iterable[tuple[str, object]]:
    """The elements of a container with their names, "" where they have none; empty for anything else."""
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
