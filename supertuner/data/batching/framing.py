"""How a picture of a batch was framed: how large it was, and what was cut off. Pure; the companion of `render`."""

from __future__ import annotations

from typing import NamedTuple

from supertuner.data.batching.render import change_of
from supertuner.data.batching.resize import crop_box
from supertuner.data.corpus import Part
from supertuner.data.ordering.buckets import Bucket


class Framing(NamedTuple):
    """In the order in which models that are told it expect it (Podell et al. 2023, SDXL, arXiv 2307.01952, 2.2)."""

    file_height: int
    file_width: int
    top: int
    """Rows cut off above the picture, in the batch's pixels: as if it had been resized first and cropped then."""
    left: int
    height: int
    width: int


def framing_of(seed: int, part: Part, sample: int, turn: int, bucket: Bucket) -> Framing:
    """Of what `render` makes of the same sample in the same turn. What is turned round was so before it was cut."""
    width, height = int(part.samples.width[sample]), int(part.samples.height[sample])
    change = change_of(seed, part, sample, turn)
    box = crop_box(width, height, bucket.width, bucket.height, change.across, change.down)
    left = width - box.left - box.width if change.flip else box.left
    return Framing(
        file_height=height,
        file_width=width,
        top=round(box.top * bucket.height / box.height),
        left=round(left * bucket.width / box.width),
        height=bucket.height,
        width=bucket.width,
    )
