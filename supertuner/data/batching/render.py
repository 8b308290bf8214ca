"""One sample in one turn: its media, decoded and changed, written into its row of a batch, and its caption.

A function of the sample's bytes, its settings and chance; what else is in the batch, which thread does it and when
make no difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from supertuner.core.types import MediaKind
from supertuner.data.batching.augment import AugmentationParams, apply_colour_map, colour_map, draw_augmentation
from supertuner.data.batching.captions import draw_caption
from supertuner.data.batching.resize import crop_and_resize, crop_box
from supertuner.data.batching.sample_rng import SampleRng
from supertuner.data.corpus import CorpusDataset
from supertuner.data.decode import raising_broken_media
from supertuner.data.decode.image import RGBImage
from supertuner.data.ordering.bucket_assignment import slice_metadata
from supertuner.data.ordering.buckets import Bucket, frames_available

if TYPE_CHECKING:
    import torch


def rng_for_sample(seed: int, dataset: CorpusDataset, sample: int, cycle: int) -> SampleRng:
    return SampleRng(seed, dataset.samples.id, dataset.samples.key(sample), cycle)


def caption_for_sample(seed: int, dataset: CorpusDataset, sample: int, cycle: int) -> str:
    return draw_caption(
        dataset.samples.captions(sample), dataset.settings.captions, rng_for_sample(seed, dataset, sample, cycle)
    )


def augmentation_for_sample(seed: int, dataset: CorpusDataset, sample: int, cycle: int) -> AugmentationParams:
    settings = dataset.settings
    return draw_augmentation(settings.augment, settings.crop == "random", rng_for_sample(seed, dataset, sample, cycle))


def render_sample(
    seed: int, dataset: CorpusDataset, sample: int, cycle: int, bucket: Bucket, out: torch.Tensor
) -> None:
    """Write the sample into `row`, which has the bucket's shape. Bytes that do not decode are a BrokenMedia.

    Whoever changes what comes out of the same bytes and settings raises `RENDER_VERSION` (data/content_key.py).
    """
    augmentation = augmentation_for_sample(seed, dataset, sample, cycle)
    if bucket.kind is MediaKind.AUDIO:
        _render_audio(dataset, sample, augmentation, bucket, out)
    elif bucket.kind is MediaKind.VIDEO:
        for number, picture in enumerate(_decode_clip(dataset, sample, augmentation, bucket)):
            _render_image(picture, dataset, augmentation, bucket, out[:, number])
    else:
        _render_image(_decode_still(dataset, sample, bucket), dataset, augmentation, bucket, out)


def _sample_label(dataset: CorpusDataset, sample: int) -> str:
    return f"datasets[{dataset.samples.id}], sample {dataset.samples.key(sample)!r}"


def _decode_still(dataset: CorpusDataset, sample: int, bucket: Bucket) -> RGBImage:
    from supertuner.data.decode.image import decode_image

    payload = dataset.samples.media(sample)
    with raising_broken_media(_sample_label(dataset, sample)):
        return decode_image(payload, (bucket.width, bucket.height))


def _decode_clip(
    dataset: CorpusDataset, sample: int, augmentation: AugmentationParams, bucket: Bucket
) -> Iterator[RGBImage]:
    from supertuner.data.decode.video import decode_video

    fps = dataset.settings.fps
    metadata = slice_metadata(dataset.samples, sample, sample + 1)
    spare_frames = max(0, int(frames_available(metadata.frames, metadata.fps, fps)[0]) - bucket.frames)
    payload = dataset.samples.media(sample)
    with raising_broken_media(_sample_label(dataset, sample)):
        yield from decode_video(payload, round(augmentation.crop_time * spare_frames), bucket.frames, fps)


def _render_audio(
    dataset: CorpusDataset, sample: int, augmentation: AugmentationParams, bucket: Bucket, out_CT: torch.Tensor
) -> None:
    import torch

    from supertuner.data.decode.audio import decode_audio

    spare_s = max(0.0, float(dataset.samples.seconds[sample]) - bucket.samples / bucket.sample_rate)
    payload = dataset.samples.media(sample)
    with raising_broken_media(_sample_label(dataset, sample)):
        sound = decode_audio(
            payload, augmentation.crop_time * spare_s, bucket.samples, bucket.sample_rate, bucket.channels
        )
    out_CT.copy_(torch.from_numpy(sound))


def _render_image(
    image: RGBImage, dataset: CorpusDataset, augmentation: AugmentationParams, bucket: Bucket, out_CHW: torch.Tensor
) -> None:
    height, width = image.shape[:2]
    box = crop_box(width, height, bucket.width, bucket.height, augmentation.crop_x, augmentation.crop_y)
    scaled = crop_and_resize(image, box, bucket.width, bucket.height, dataset.settings.resize_filter)
    colours = colour_map(augmentation)
    if colours is not None:
        apply_colour_map(scaled, colours)
    out_CHW.copy_(scaled.flip(-1) if augmentation.flip else scaled)
