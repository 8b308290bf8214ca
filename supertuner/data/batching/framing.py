"""How a picture of a batch was framed: how large it was, and what was cut off. Pure; the companion of `render`."""

from __future__ import annotations

from typing import NamedTuple

from supertuner.data.batching.render import augmentation_for_sample
from supertuner.data.batching.resize import crop_box
from supertuner.data.corpus import CorpusDataset
from supertuner.data.ordering.buckets import Bucket


class ImageFraming(NamedTuple):
    """In the order in which models that are told it expect it (Podell et al. 2023, SDXL, arXiv 2307.01952, 2.2)."""

    original_height: int
    original_width: int
    crop_top: int
    """Rows cut off above the picture, in the batch's pixels: as if it had been resized first and cropped then."""
    crop_left: int
    target_height: int
    target_width: int


def framing_for_sample(seed: int, dataset: CorpusDataset, sample: int, cycle: int, bucket: Bucket) -> ImageFraming:
    """Of what `render` makes of the same sample in the same turn. What is turned round was so before it was cut."""
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
