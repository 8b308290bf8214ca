"""The pictures that samples were made from, for models that learn to change one into the other.

They lie in another folder under the samples' names, and are not staged: each is read when its sample is encoded.
What is wrong with one by its header is told before. All of a bucket have one size, of the bucket's ratio, so that they
share batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from numpy.typing import NDArray

from supertuner.config.settings.data import Dataset
from supertuner.core.errors import BrokenMedia, SourceError
from supertuner.data.batching.resize import Filter, crop_box, resized
from supertuner.data.decode import broken_means
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.ordering.members import Members
from supertuner.data.samples import Samples
from supertuner.data.sidecar_images import pictures_in, size_of
from supertuner.data.sources.listing import first_names

if TYPE_CHECKING:
    import torch

STEP = 32
"""Sides are multiples of this."""
VERSION = 1
"""Raise it whenever the same file and settings give other pixels."""


@dataclass(frozen=True, eq=False, slots=True)
class Originals:
    """The originals of one dataset, by the numbers of its samples."""

    files: tuple[Path, ...]
    side: int
    """Of the square whose area they have."""
    filter: Filter
    buckets: tuple[Bucket, ...]
    places: NDArray[np.int32]
    """For each sample its bucket's place in `buckets`; of those that have none, anything."""

    def size(self, bucket: Bucket) -> tuple[int, int]:
        """Width and height: the bucket's ratio, the area of the square, sides rounded."""
        wide = math.sqrt(self.side * self.side * bucket.width / bucket.height)
        high = wide * bucket.height / bucket.width
        return max(STEP, round(wide / STEP) * STEP), max(STEP, round(high / STEP) * STEP)

    def picture(self, sample: int) -> torch.Tensor:
        """uint8 CHW. What does not fit is cut off at both sides. Bytes that do not decode are a BrokenMedia."""
        from supertuner.data.decode.image import decode_image

        width, height = self.size(self._bucket(sample))
        file = self.files[sample]
        with broken_means(f"original {file}"):
            picture = decode_image(memoryview(file.read_bytes()), (width, height))
        box = crop_box(picture.shape[1], picture.shape[0], width, height, 0.5, 0.5)
        return resized(picture, box, width, height, self.filter).contiguous()

    def mark(self, sample: int) -> bytes:
        """What decides the picture: the file's bytes, its size, how it is resized. The file is read for it."""
        content = xxhash.xxh3_128_digest(self.files[sample].read_bytes())
        return content + f" {VERSION} {self.size(self._bucket(sample))} {self.filter}".encode()

    def _bucket(self, sample: int) -> Bucket:
        return self.buckets[int(self.places[sample])]


def originals_of(settings: Dataset, samples: Samples, members: Members) -> Originals | None:
    """A dataset's originals, if it names a folder of them; every sample that is used must have one that is whole."""
    if settings.conditioning_dir is None:
        return None
    place = f"datasets[{settings.id}].conditioning_dir"
    folder, names = pictures_in(place, settings.conditioning_dir)
    keys = [samples.key(number) for number in range(len(samples))]
    without = [key for key in keys if key not in names]
    if without:
        raise SourceError(
            f"{place}: {len(without)} of {len(keys)} samples have no picture in {folder} "
            f"({first_names(without, len(without))}); it has the name of its sample, whatever its ending"
        )
    files = tuple(Path(folder) / names[key] for key in keys)
    for file in files:
        try:
            size_of(f"{place}: {file}", str(file))
        except BrokenMedia as error:
            raise SourceError(f"{error}; mend it, or remove its sample") from error
    places = np.zeros(len(samples), np.int32)
    for number in range(len(members.buckets)):
        places[members.of(number)] = number
    return Originals(files, settings.conditioning_resolution, settings.resize_filter, members.buckets, places)
