"""What a corpus needs of a model's caches: spaces, keys, and how entries are made. Nothing is opened or encoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from supertuner.cache.fill import EntryRequest
from supertuner.cache.keys import CacheNamespace, EntryKeys
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import ModelError
from supertuner.data.cache_policy import CacheMode, DatasetCachePolicy, dataset_cache_policy
from supertuner.data.corpus import Corpus
from supertuner.models.spec import Family, ModelDescription
from supertuner.step.precision import latent_storage_dtype
from supertuner.train.encoding.encoders import (
    EncoderFingerprints,
    LazyDecoderPool,
    LazyEncoders,
    media_entry_maker,
    text_entry_maker,
)
from supertuner.train.encoding.media import NO_KEY, MediaPlan, build_media_plan, relative_job_sizes
from supertuner.train.encoding.text import TextPlan, build_text_plan

if TYPE_CHECKING:
    import torch


CacheKind: TypeAlias = Literal["latents", "text"]
CACHE_KINDS: tuple[CacheKind, ...] = ("latents", "text")


@dataclass(frozen=True, eq=False, slots=True)
class CacheRequirements:
    """What follows from the settings alone."""

    corpus: Corpus
    policies: tuple[DatasetCachePolicy, ...]
    """For each dataset of the corpus."""
    media_namespace: CacheNamespace
    text_namespace: CacheNamespace

    def namespace(self, kind: CacheKind) -> CacheNamespace:
        return self.media_namespace if kind == "latents" else self.text_namespace

    def uses_mode(self, kind: CacheKind, mode: CacheMode) -> bool:
        """Whether any dataset's entries of a kind are treated so."""
        return any((policy.media_mode if kind == "latents" else policy.text_mode) is mode for policy in self.policies)


@dataclass(frozen=True, eq=False, slots=True)
class CachePlan:
    """All entries that are cached once. It is as large as the corpus, and done with once they are there."""

    media: MediaPlan
    text: TextPlan
    text_keys: EntryKeys

    def media_request(self, corpus: Corpus, decoders: LazyDecoderPool, encoders: LazyEncoders) -> EntryRequest:
        keys, jobs = self.media.keys, self.media.jobs
        if not (needed := keys != NO_KEY).all():
            keys, jobs = keys[needed], jobs.take(np.flatnonzero(needed))
        make = media_entry_maker(corpus, jobs, decoders, encoders)
        return EntryRequest(keys, make, relative_job_sizes(corpus, jobs), "encoding samples")

    def text_request(self, encoders: LazyEncoders) -> EntryRequest:
        return EntryRequest(self.text_keys, text_entry_maker(self.text.texts, encoders), title="encoding captions")

    def keys(self, kind: CacheKind) -> EntryKeys:
        """Keys of all entries of a kind that are cached once."""
        return self.media.keys[self.media.keys != NO_KEY] if kind == "latents" else self.text_keys


def cache_requirements(
    config: RunConfig, corpus: Corpus, identities: EncoderFingerprints, dtype: torch.dtype
) -> CacheRequirements:
    return CacheRequirements(
        corpus=corpus,
        policies=tuple(dataset_cache_policy(dataset.settings, config.cache_config) for dataset in corpus.datasets),
        media_namespace=CacheNamespace("latents", identities.media, _dtype_name(latent_storage_dtype(dtype))),
        text_namespace=CacheNamespace("text", identities.text, _dtype_name(dtype)),
    )


def build_cache_plan(requirements: CacheRequirements, until: int | None = None) -> CachePlan:
    """`until` is the position at which the run ends: samples that it never draws are not needed."""
    text = build_text_plan(requirements.corpus, requirements.policies, until)
    return CachePlan(
        media=build_media_plan(requirements.corpus, requirements.policies, requirements.media_namespace, until),
        text=text,
        text_keys=requirements.text_namespace.entry_keys(text_input.cache_key_bytes() for text_input in text.texts),
    )


def require_supported_buckets(corpus: Corpus, family: Family, model: ModelDescription) -> None:
    """ModelError, naming dataset, bucket, reason and remedy, for the first bucket that the model cannot take."""
    _require_references(corpus, model)
    for group in corpus.order.groups:
        bucket = group.bucket
        key_path = f"datasets[{group.dataset_id}], bucket {bucket.label} ({len(group.sample_indices)} samples)"
        if bucket.kind not in model.media_kinds:
            kinds = " and ".join(sorted(model.media_kinds))
            raise ModelError(
                f"{key_path}: {model.title} is trained on {kinds}, not on {bucket.kind}; remove that dataset"
            )
        reason = family.unsupported_reason(model, bucket.shape)
        if reason is not None:
            raise ModelError(f"{key_path}: {reason}; change bucket_step, resolution or frames of that dataset")


def _require_references(corpus: Corpus, model: ModelDescription) -> None:
    resolutions = {dataset.settings.conditioning_resolution for dataset in corpus.datasets}
    for part in corpus.datasets:
        key_path = f"datasets[{part.settings.id}]"
        if model.edits_images and part.references is None:
            raise ModelError(f"{key_path}: {model.title} learns to change pictures; name theirs in conditioning_dir")
        if not model.edits_images and part.references is not None:
            raise ModelError(f"{key_path}: {model.title} is not given pictures to change; remove conditioning_dir")
        if model.edits_images and len(resolutions) > 1:
            raise ModelError(
                f"{key_path}: conditioning_resolution must be the same in all datasets: they share batches"
            )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
