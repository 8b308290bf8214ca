"""What a corpus needs of a model's caches: spaces, keys, and how entries are made. Nothing is opened or encoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from supertuner.cache.fill import Wanted
from supertuner.cache.keys import Keys, Space
from supertuner.config.settings.tree import RunConfig
from supertuner.core.errors import ModelError
from supertuner.data.cache_policy import How, Treatment, treatment
from supertuner.data.corpus import Corpus
from supertuner.models.spec import Family, Model
from supertuner.step.precision import stored_dtype
from supertuner.train.encoding.encoders import Encoders, Identities, LazyDecoders, media_maker, text_maker
from supertuner.train.encoding.media import NO_KEY, MediaPlan, job_sizes, media_plan
from supertuner.train.encoding.text import TextPlan, text_plan

if TYPE_CHECKING:
    import torch


What: TypeAlias = Literal["latents", "text"]
KINDS: tuple[What, ...] = ("latents", "text")


@dataclass(frozen=True, eq=False, slots=True)
class Needs:
    """What follows from the settings alone."""

    corpus: Corpus
    treatments: tuple[Treatment, ...]
    """For each dataset of the corpus."""
    media_space: Space
    text_space: Space

    def space(self, what: What) -> Space:
        return self.media_space if what == "latents" else self.text_space

    def any_is(self, what: What, how: How) -> bool:
        """Whether any dataset's entries of a kind are treated so."""
        return any((one.media if what == "latents" else one.text) is how for one in self.treatments)


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """All entries that are cached once. It is as large as the corpus, and done with once they are there."""

    media: MediaPlan
    text: TextPlan
    text_keys: Keys

    def media_wanted(self, corpus: Corpus, decoders: LazyDecoders, encoders: Encoders) -> Wanted:
        keys, jobs = self.media.keys, self.media.jobs
        if not (needed := keys != NO_KEY).all():
            keys, jobs = keys[needed], jobs.take(np.flatnonzero(needed))
        make = media_maker(corpus, jobs, decoders, encoders)
        return Wanted(keys, make, job_sizes(corpus, jobs), "encoding samples")

    def text_wanted(self, encoders: Encoders) -> Wanted:
        return Wanted(self.text_keys, text_maker(self.text.texts, encoders), title="encoding captions")

    def keys(self, what: What) -> Keys:
        """Keys of all entries of a kind that are cached once."""
        return self.media.keys[self.media.keys != NO_KEY] if what == "latents" else self.text_keys


def needs_of(config: RunConfig, corpus: Corpus, identities: Identities, dtype: torch.dtype) -> Needs:
    return Needs(
        corpus=corpus,
        treatments=tuple(treatment(part.settings, config.cache_config) for part in corpus.parts),
        media_space=Space("latents", identities.media, _name(stored_dtype(dtype))),
        text_space=Space("text", identities.text, _name(dtype)),
    )


def plan_of(needs: Needs, until: int | None = None) -> Plan:
    """`until` is the position at which the run ends: samples that it never draws are not needed."""
    text = text_plan(needs.corpus, needs.treatments, until)
    return Plan(
        media=media_plan(needs.corpus, needs.treatments, needs.media_space, until),
        text=text,
        text_keys=needs.text_space.keys(one.content() for one in text.texts),
    )


def require_buckets(corpus: Corpus, family: Family, model: Model) -> None:
    """ModelError, naming dataset, bucket, reason and remedy, for the first bucket that the model cannot take."""
    _require_originals(corpus, model)
    for group in corpus.order.groups:
        bucket = group.bucket
        place = f"datasets[{group.dataset_id}], bucket {bucket.label} ({len(group.members)} samples)"
        if bucket.kind not in model.kinds:
            kinds = " and ".join(sorted(model.kinds))
            raise ModelError(f"{place}: {model.title} is trained on {kinds}, not on {bucket.kind}; remove that dataset")
        reason = family.why_not(model, bucket.shape)
        if reason is not None:
            raise ModelError(f"{place}: {reason}; change bucket_step, resolution or frames of that dataset")


def _require_originals(corpus: Corpus, model: Model) -> None:
    sides = {part.settings.conditioning_resolution for part in corpus.parts}
    for part in corpus.parts:
        place = f"datasets[{part.settings.id}]"
        if model.edits and part.originals is None:
            raise ModelError(f"{place}: {model.title} learns to change pictures; name theirs in conditioning_dir")
        if not model.edits and part.originals is not None:
            raise ModelError(f"{place}: {model.title} is not given pictures to change; remove conditioning_dir")
        if model.edits and len(sides) > 1:
            raise ModelError(f"{place}: conditioning_resolution must be the same in all datasets: they share batches")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
