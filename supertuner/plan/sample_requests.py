"""What every validation samples: decided once, before training, so that samples can be compared. Pure.

Prompts are `validation.prompts`; without them the first captions of held-out data, or else of the training data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from supertuner.config.settings.validation import ValidationSettings
from supertuner.core.errors import TrainError
from supertuner.core.events import DecisionEvent, Sink
from supertuner.core.types import MediaKind
from supertuner.data.ordering.buckets import Bucket
from supertuner.models.spec import SampleRequest

PROMPTS_FROM_CAPTIONS = 4
"""How many prompts are taken from captions."""
MAX_SAMPLES_SEARCHED = 256
"""Samples that are searched at most for different captions."""


@dataclass(frozen=True, eq=False, slots=True)
class CaptionedSample:
    """A sample of the data, as a source of a prompt and of a first frame."""

    caption: str
    image: NDArray[np.uint8] | None = None
    """Its first frame (HWC), for models that start from one."""


@dataclass(frozen=True, slots=True)
class SampleSize:
    width: int
    height: int
    frames: int


@dataclass(frozen=True, eq=False, slots=True)
class ValidationSamplePlan:
    prompts: tuple[str, ...]
    images: tuple[NDArray[np.uint8] | None, ...]
    """The first frame for each prompt; None: none."""
    seeds: tuple[int, ...]
    size: SampleSize
    fps: float
    negative_prompt: str
    inference_steps: int
    guidance_scale: float

    def __len__(self) -> int:
        return len(self.prompts) * len(self.seeds)

    def requests(self) -> Iterator[tuple[int, int, SampleRequest]]:
        """(row, column, request) of every sample: one row per prompt, one column per seed."""
        for row, (prompt, image) in enumerate(zip(self.prompts, self.images, strict=True)):
            for column, seed in enumerate(self.seeds):
                request = SampleRequest(
                    prompt=prompt,
                    negative_prompt=self.negative_prompt,
                    seed=seed,
                    **asdict(self.size),
                    inference_steps=self.inference_steps,
                    guidance_scale=self.guidance_scale,
                    image=image,
                )
                yield row, column, request


def plan_validation_samples(
    settings: ValidationSettings,
    *,
    default_size: SampleSize,
    held_out: Iterable[CaptionedSample],
    training_data: Iterable[CaptionedSample],
    sink: Sink,
) -> ValidationSamplePlan:
    """`default_size`: the size where the settings give none. Only as many samples of the data are read as needed."""
    samples = _choose_samples(settings, held_out, training_data, sink)
    return ValidationSamplePlan(
        prompts=tuple(one.caption for one in samples),
        images=tuple(one.image for one in samples),
        seeds=settings.seeds,
        size=_resolve_size(settings, default_size, sink),
        fps=settings.fps,
        negative_prompt=settings.negative_prompt,
        inference_steps=settings.inference_steps,
        guidance_scale=settings.guidance_scale,
    )


def largest_sample_size(buckets: Iterable[Bucket]) -> SampleSize:
    """The size of the bucket with the most pixels; among equals the narrowest, so that the order does not matter."""
    visual_buckets = [b for b in buckets if b.kind is not MediaKind.AUDIO]
    if not visual_buckets:
        raise TrainError("no dataset has images or videos: set validation.width, height and frames for samples")
    largest_bucket = max(visual_buckets, key=lambda b: (b.width * b.height * max(1, b.frames), -b.width, -b.frames))
    return SampleSize(largest_bucket.width, largest_bucket.height, max(1, largest_bucket.frames))


def _resolve_size(settings: ValidationSettings, default_size: SampleSize, sink: Sink) -> SampleSize:
    width, height = settings.width or default_size.width, settings.height or default_size.height
    size = SampleSize(width, height, settings.frames or default_size.frames)
    if None in (settings.width, settings.frames):
        value = f"{size.width}×{size.height}, {size.frames} frame{'s' if size.frames != 1 else ''}"
        sink.emit(DecisionEvent("validation.size", value, "values that are not set come from the largest bucket"))
    return size


def _choose_samples(
    settings: ValidationSettings,
    held_out: Iterable[CaptionedSample],
    training_data: Iterable[CaptionedSample],
    sink: Sink,
) -> list[CaptionedSample]:
    prompts = settings.prompts
    count = len(prompts) or PROMPTS_FROM_CAPTIONS
    samples, origin = _distinct_by_caption(held_out, count), "held-out data"
    if not samples:
        samples, origin = _distinct_by_caption(training_data, count), "the training data"
    if prompts:
        frames: list[NDArray[np.uint8] | None] = [one.image for one in samples if one.image is not None]
        frames = frames or [None]
        return [CaptionedSample(prompt, frames[place % len(frames)]) for place, prompt in enumerate(prompts)]
    samples = samples or [CaptionedSample("")]
    captions = [one.caption for one in samples]
    found = f": the first captions of {origin}" if any(captions) else ", and the data has no captions"
    sink.emit(DecisionEvent("validation.prompts", captions, f"validation.prompts is empty{found}"))
    return samples


def _distinct_by_caption(samples: Iterable[CaptionedSample], max_count: int) -> list[CaptionedSample]:
    """The first samples with different captions; an empty caption only if there is no other."""
    by_caption: dict[str, CaptionedSample] = {}
    for sample in islice(samples, MAX_SAMPLES_SEARCHED):
        by_caption.setdefault(sample.caption.strip(), sample)
        if len(by_caption) - ("" in by_caption) >= max_count:
            break
    captioned = [sample for caption, sample in by_caption.items() if caption]
    return captioned or list(by_caption.values())
