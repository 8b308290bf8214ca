"""Renders a sample for a cycle: decodes, crops, resizes and augments it into a row of a batch, and draws its caption.

The result is a function of the sample's bytes, its settings and its SampleRng only. It does not depend on the rest of
the batch, the thread, or the time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple
from typing import TYPE_CHECKING, NamedTuple

from supertuner.config.settings.data import DatasetSettings
from supertuner.core.types import MediaKind
from supertuner.data.batching.augment import AugmentationParams, apply_colour_map, colour_map, draw_augmentation
from supertuner.data.batching.captions import draw_caption
from supertuner.data.batching.sample_rng import SampleRng
from supertuner.data.corpus import CorpusDataset
from supertuner.data.decode import raising_broken_media
from supertuner.data.decode.decode_memory import (
    AUDIO_COPIES,
    RENDERED_BYTES_PER_PIXEL,
    VIDEO_BYTES_PER_PIXEL,
    DecodeMemory,
)
from supertuner.data.decode.image import EncodedImage, RGBImage
from supertuner.data.decode.resize import crop_and_resize, crop_box
from supertuner.data.ordering.buckets import Bucket, frames_available

if TYPE_CHECKING:
    import torch

RENDER_VERSION = 1
"""Part of every cache key. Increase it whenever decoding, resizing or augmentation gives different values for the same
bytes and settings."""


def transform_key_bytes(
    settings: DatasetSettings, bucket: Bucket, augmentation: AugmentationParams, version: int = RENDER_VERSION
) -> bytes:
    """Everything that determines a rendered sample except the file's bytes, for its cache key: equal bytes mean equal
    media. Names, paths, seeds and positions are not part of it."""
    is_visual = bucket.kind is not MediaKind.AUDIO
    parts = {
        "version": version,
        "kind": bucket.kind,
        "shape": bucket.shape,
        "sample_rate": bucket.sample_rate,
        "filter": settings.resize_filter if is_visual else "",
        "fps": settings.fps if bucket.kind is MediaKind.VIDEO else None,
        "change": [float(value).hex() for value in astuple(augmentation)],
    }
    return json.dumps(parts, sort_keys=True).encode()


def rng_for_sample(seed: int, dataset: CorpusDataset, sample: int, cycle: int) -> SampleRng:
    return SampleRng(seed, dataset.samples.id, dataset.samples.key(sample), cycle)


def caption_for_sample(seed: int, dataset: CorpusDataset, sample: int, cycle: int, tag_cycle: int | None = None) -> str:
    """The caption that a cycle draws. `tag_cycle` is the cycle whose order of shuffled tags it has; None: the same."""
    rng = rng_for_sample(seed, dataset, sample, cycle)
    tag_rng = None if tag_cycle is None else rng_for_sample(seed, dataset, sample, tag_cycle)
    return draw_caption(dataset.samples.captions(sample), dataset.settings.captions, rng, tag_rng)


def augmentation_for_sample(seed: int, dataset: CorpusDataset, sample: int, cycle: int) -> AugmentationParams:
    settings = dataset.settings
    return draw_augmentation(settings.augment, settings.crop == "random", rng_for_sample(seed, dataset, sample, cycle))


class ImageFraming(NamedTuple):
    """How a rendered image was cropped, in the order of SDXL's micro-conditioning (Podell et al. 2023, arXiv
    2307.01952, section 2.2)."""

    original_height: int
    original_width: int
    crop_top: int
    """Rows cut off above the image, in pixels of the batch: as if the image had been resized first and then cropped."""
    crop_left: int
    target_height: int
    target_width: int


def framing_for_sample(seed: int, dataset: CorpusDataset, sample: int, cycle: int, bucket: Bucket) -> ImageFraming:
    """The framing of what `render_sample` writes for the same arguments. A flipped image counts as flipped before it
    was cropped."""
    width, height = int(dataset.samples.width[sample]), int(dataset.samples.height[sample])
    augmentation = augmentation_for_sample(seed, dataset, sample, cycle)
    box = crop_box(width, height, bucket.width, bucket.height, augmentation.crop_x, augmentation.crop_y)
    left = width - box.left - box.width if augmentation.flip else box.left
    return ImageFraming(
        original_height=height,
        original_width=width,
        crop_top=round(box.top * bucket.height / box.height),
        crop_left=round(left * bucket.width / box.width),
        target_height=bucket.height,
        target_width=bucket.width,
    )


def render_sample(
    seed: int,
    dataset: CorpusDataset,
    sample: int,
    cycle: int,
    bucket: Bucket,
    out: torch.Tensor,
    memory: DecodeMemory | None = None,
) -> None:
    """Write the sample into `out`, which has the bucket's shape. Raises BrokenMediaError if the bytes do not decode.

    With `memory`, which threads share, decoding waits until this sample is admitted. A change to this function that
    gives different values for the same bytes and settings must increase RENDER_VERSION.
    """
    augmentation = augmentation_for_sample(seed, dataset, sample, cycle)
    if bucket.kind is MediaKind.IMAGE:
        image, size = _open_still(dataset, sample), (bucket.width, bucket.height)
        with _reserved(memory, image.peak_bytes(size) + RENDERED_BYTES_PER_PIXEL * bucket.width * bucket.height):
            with raising_broken_media(_sample_label(dataset, sample)):
                pixels = image.decode(size)
            _render_image(pixels, dataset, augmentation, bucket, out)
    elif bucket.kind is MediaKind.VIDEO:
        frame_pixels = int(dataset.samples.width[sample]) * int(dataset.samples.height[sample])
        rendered_bytes = RENDERED_BYTES_PER_PIXEL * bucket.width * bucket.height
        with _reserved(memory, VIDEO_BYTES_PER_PIXEL * frame_pixels + rendered_bytes):
            for number, frame in enumerate(_decode_clip(dataset, sample, augmentation, bucket)):
                _render_image(frame, dataset, augmentation, bucket, out[:, number])
    else:
        with _reserved(memory, AUDIO_COPIES * out.nbytes):
            _render_audio(dataset, sample, augmentation, bucket, out)


def _reserved(memory: DecodeMemory | None, nbytes: int) -> AbstractContextManager[None]:
    return nullcontext() if memory is None else memory.reserve(nbytes)


def _sample_label(dataset: CorpusDataset, sample: int) -> str:
    return f"datasets[{dataset.samples.id}], sample {dataset.samples.key(sample)!r}"


def _open_still(dataset: CorpusDataset, sample: int) -> EncodedImage:
    payload = dataset.samples.media(sample)
    with raising_broken_media(_sample_label(dataset, sample)):
        return EncodedImage.open(payload)


def _decode_clip(
    dataset: CorpusDataset, sample: int, augmentation: AugmentationParams, bucket: Bucket
) -> Iterator[RGBImage]:
    from supertuner.data.decode.video import decode_video

    fps, samples, row = dataset.settings.fps, dataset.samples, slice(sample, sample + 1)
    spare_frames = max(0, int(frames_available(samples.frames[row], samples.fps[row], fps)[0]) - bucket.frames)
    payload = samples.media(sample)
    with raising_broken_media(_sample_label(dataset, sample)):
        yield from decode_video(payload, round(augmentation.crop_time * spare_frames), bucket.frames, fps)


def _render_audio(
    dataset: CorpusDataset, sample: int, augmentation: AugmentationParams, bucket: Bucket, out_CT: torch.Tensor
) -> None:
    import torch

    from supertuner.data.decode.audio import decode_audio

    spare_s = max(0.0, float(dataset.samples.seconds[sample]) - bucket.samples / bucket.sample_rate)
    payload, begin_s = dataset.samples.media(sample), augmentation.crop_time * spare_s
    with raising_broken_media(_sample_label(dataset, sample)):
        sound = decode_audio(payload, begin_s, bucket.samples, bucket.sample_rate, bucket.channels)
    out_CT.copy_(torch.from_numpy(sound))


def _render_image(
    image: RGBImage, dataset: CorpusDataset, augmentation: AugmentationParams, bucket: Bucket, out_CHW: torch.Tensor
) -> None:
    height, width = image.shape[:2]
    box = crop_box(width, height, bucket.width, bucket.height, augmentation.crop_x, augmentation.crop_y)
    scaled = crop_and_resize(image, box, bucket.width, bucket.height, dataset.settings.resize_filter)
    if (colours := colour_map(augmentation)) is not None:
        apply_colour_map(scaled, colours)
    out_CHW.copy_(scaled.flip(-1) if augmentation.flip else scaled)
