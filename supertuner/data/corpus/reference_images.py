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

from supertuner.config.settings.data import DatasetSettings
from supertuner.core.errors import BrokenMediaError, SourceError
from supertuner.data.batching.resize import ResizeFilter, crop_and_resize, crop_box
from supertuner.data.decode import raising_broken_media
from supertuner.data.ordering.bucket_members import BucketMembers
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.samples import SampleCollection
from supertuner.data.sidecar_images import list_sidecar_images, read_image_size
from supertuner.data.sources.listing import first_names

if TYPE_CHECKING:
    import torch

SIDE_MULTIPLE = 32
"""Sides are multiples of this."""
REFERENCE_VERSION = 1
"""Raise it whenever the same file and settings give other pixels."""


@dataclass(frozen=True, eq=False, slots=True)
class ReferenceImages:
    """The originals of one dataset, by the numbers of its samples."""

    files: tuple[Path, ...]
    resolution: int
    """Of the square whose area they have."""
    resize_filter: ResizeFilter
    buckets: tuple[Bucket, ...]
    bucket_indices: NDArray[np.int32]
    """For each sample its bucket's place in `buckets`; of those that have none, anything."""

    def image_size(self, bucket: Bucket) -> tuple[int, int]:
        """Width and height: the bucket's ratio, the area of the square, sides rounded."""
        wide = math.sqrt(self.resolution * self.resolution * bucket.width / bucket.height)
        high = wide * bucket.height / bucket.width
        return max(SIDE_MULTIPLE, round(wide / SIDE_MULTIPLE) * SIDE_MULTIPLE), max(
            SIDE_MULTIPLE, round(high / SIDE_MULTIPLE) * SIDE_MULTIPLE
        )

    def load_image(self, sample: int) -> torch.Tensor:
        """uint8 CHW. What does not fit is cut off at both sides. Bytes that do not decode are a BrokenMedia."""
        from supertuner.data.decode.image import decode_image

        width, height = self.image_size(self._bucket(sample))
        file = self.files[sample]
        with raising_broken_media(f"original {file}"):
            image = decode_image(memoryview(file.read_bytes()), (width, height))
        box = crop_box(image.shape[1], image.shape[0], width, height, 0.5, 0.5)
        return crop_and_resize(image, box, width, height, self.resize_filter).contiguous()

    def cache_key_bytes(self, sample: int) -> bytes:
        """What decides the picture: the file's bytes, its size, how it is resized. The file is read for it."""
        file_digest = xxhash.xxh3_128_digest(self.files[sample].read_bytes())
        return (
            file_digest + f" {REFERENCE_VERSION} {self.image_size(self._bucket(sample))} {self.resize_filter}".encode()
        )

    def _bucket(self, sample: int) -> Bucket:
        return self.buckets[int(self.bucket_indices[sample])]


def find_reference_images(
    settings: DatasetSettings, samples: SampleCollection, members: BucketMembers
) -> ReferenceImages | None:
    """A dataset's originals, if it names a folder of them; every sample that is used must have one that is whole."""
    if settings.conditioning_dir is None:
        return None
    key_path = f"datasets[{settings.id}].conditioning_dir"
    folder, names = list_sidecar_images(key_path, settings.conditioning_dir)
    keys = [samples.key(number) for number in range(len(samples))]
    missing_keys = [key for key in keys if key not in names]
    if missing_keys:
        raise SourceError(
            f"{key_path}: {len(missing_keys)} of {len(keys)} samples have no picture in {folder} "
            f"({first_names(missing_keys, len(missing_keys))}); it has the name of its sample, whatever its ending"
        )
    files = tuple(Path(folder) / names[key] for key in keys)
    for file in files:
        try:
            read_image_size(f"{key_path}: {file}", str(file))
        except BrokenMediaError as error:
            raise SourceError(f"{error}; mend it, or remove its sample") from error
    bucket_indices = np.zeros(len(samples), np.int32)
    for number in range(len(members.buckets)):
        bucket_indices[members.samples_in(number)] = number
    return ReferenceImages(
        files, settings.conditioning_resolution, settings.resize_filter, members.buckets, bucket_indices
    )
