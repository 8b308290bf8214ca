"""What is sampled at every validation: decided once, before training, so that pictures can be compared. Pure.

Prompts are `validation.prompts`; if there are none, the first captions of held-out data; if there is none, of the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from supertuner.config.settings.validation import ValidationSettings
from supertuner.core.errors import TrainError
from supertuner.core.events import Decided, Sink
from supertuner.core.types import MediaKind
from supertuner.data.ordering.buckets import Bucket
from supertuner.models.spec import SampleRequest

FEW = 4
"""Prompts that are taken from captions."""
LOOKED_AT = 256
"""Samples whose captions are looked at for different ones."""


@dataclass(frozen=True, eq=False, slots=True)
class Captioned:
    """A sample of the data that prompts, and first frames, can be taken from."""

    caption: str
    image: NDArray[np.uint8] | None = None
    """HWC: its first frame, for models that start from one."""


@dataclass(frozen=True, slots=True)
class Size:
    width: int
    height: int
    frames: int


@dataclass(frozen=True, eq=False, slots=True)
class SamplePlan:
    prompts: tuple[str, ...]
    images: tuple[NDArray[np.uint8] | None, ...]
    """For each prompt its first frame."""
    seeds: tuple[int, ...]
    size: Size
    fps: float
    negative_prompt: str
    inference_steps: int
    guidance_scale: float

    def __len__(self) -> int:
        return len(self.prompts) * len(self.seeds)

    def requests(self) -> Iterator[tuple[int, int, SampleRequest]]:
        """(row, column, request) of every sample: each prompt with each seed."""
        for row, (prompt, image) in enumerate(zip(self.prompts, self.images, strict=True)):
            for column, seed in enumerate(self.seeds):
                yield row, column, self._request(prompt, seed, image)

    def _request(self, prompt: str, seed: int, image: NDArray[np.uint8] | None) -> SampleRequest:
        return SampleRequest(
            prompt=prompt,
            negative_prompt=self.negative_prompt,
            seed=seed,
            width=self.size.width,
            height=self.size.height,
            frames=self.size.frames,
            inference_steps=self.inference_steps,
            guidance_scale=self.guidance_scale,
            image=image,
        )


def plan_samples(
    settings: ValidationSettings,
    *,
    default: Size,
    held_out: Iterable[Captioned],
    data: Iterable[Captioned],
    sink: Sink,
) -> SamplePlan:
    """`default` is what samples are like where the settings do not say; of the data as much is read as is needed."""
    chosen = _chosen(settings, held_out, data, sink)
    return SamplePlan(
        prompts=tuple(one.caption for one in chosen),
        images=tuple(one.image for one in chosen),
        seeds=settings.seeds,
        size=_size(settings, default, sink),
        fps=settings.fps,
        negative_prompt=settings.negative_prompt,
        inference_steps=settings.inference_steps,
        guidance_scale=settings.guidance_scale,
    )


def largest(buckets: Iterable[Bucket]) -> Size:
    """The size of the bucket with the most pixels; the smallest of equals by its sides, so that order is no matter."""
    shown = [b for b in buckets if b.kind is not MediaKind.AUDIO]
    if not shown:
        raise TrainError("no dataset has pictures or videos: set validation.width, height and frames for samples")
    found = max(shown, key=lambda b: (b.width * b.height * max(1, b.frames), -b.width, -b.frames))
    return Size(found.width, found.height, max(1, found.frames))


def _size(settings: ValidationSettings, default: Size, sink: Sink) -> Size:
    size = Size(settings.width or default.width, settings.height or default.height, settings.frames or default.frames)
    if None in (settings.width, settings.frames):
        value = f"{size.width}×{size.height}, {size.frames} frame{'s' if size.frames != 1 else ''}"
        sink.emit(Decided("validation.size", value, "what is not set is taken from the largest bucket"))
    return size


def _chosen(
    settings: ValidationSettings, held_out: Iterable[Captioned], data: Iterable[Captioned], sink: Sink
) -> list[Captioned]:
    given = settings.prompts
    wanted = len(given) or FEW
    found, where = _distinct(held_out, wanted), "held-out data"
    if not found:
        found, where = _distinct(data, wanted), "the training data"
    if given:
        frames: list[NDArray[np.uint8] | None] = [one.image for one in found if one.image is not None]
        frames = frames or [None]
        return [Captioned(prompt, frames[place % len(frames)]) for place, prompt in enumerate(given)]
    found = found or [Captioned("")]
    captions = [one.caption for one in found]
    reason = f"none are given: the first captions of {where}" if any(captions) else "none are given, nor any captions"
    sink.emit(Decided("validation.prompts", captions, reason))
    return found


def _distinct(samples: Iterable[Captioned], most: int) -> list[Captioned]:
    """The first samples with different captions; an empty one only if there is no other."""
    found: dict[str, Captioned] = {}
    for sample in islice(samples, LOOKED_AT):
        found.setdefault(sample.caption.strip(), sample)
        if len(found) - ("" in found) >= most:
            break
    told = [sample for caption, sample in found.items() if caption]
    return told or list(found.values())
