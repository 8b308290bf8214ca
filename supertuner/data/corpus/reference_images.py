"""Reference images: the inputs of editing models, which learn to turn them into the samples.

They are in another folder with the samples' names, and are not staged: each is read when its sample is encoded. Their
headers are checked before the run starts. All references of a bucket get the same size, with the bucket's aspect ratio,
so that they fit into one batch.
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
from supertuner.data.corpus.sidecar_images import list_sidecar_images, read_image_size
from supertuner.data.decode import raising_broken_media
from supertuner.data.decode.resize import ResizeFilter, crop_and_resize, crop_box
from supertuner.data.ordering.bucket_members import BucketMembers
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.ordering.sample_collection import SampleCollection
from supertuner.data.sources.listing import first_names

if TYPE_CHECKING:
    import torch

SIDE_MULTIPLE = 32
"""Width and height are multiples of this."""
REFERENCE_VERSION = 1
"""Part of every cache key. Increase it whenever the same file and settings give different pixels."""


@dataclass(frozen=True, eq=False, slots=True)
class ReferenceImages:
    """The reference images of one dataset, by the index of their sample."""

    files: tuple[Path, ...]
    resolution: int
    """Side in pixels of the square whose area the images have."""
    resize_filter: ResizeFilter
    buckets: tuple[Bucket, ...]
    bucket_indices: NDArray[np.int32]
    """For each sample the index of its bucket in `buckets`; undefined for samples without a bucket."""

    def image_size(self, bucket: Bucket) -> tuple[int, int]:
        """Width and height: the bucket's aspect ratio, the area resolution², sides rounded to SIDE_MULTIPLE."""
        wide = math.sqrt(self.resolution * self.resolution * bucket.width / bucket.height)
        high = wide * bucket.height / bucket.width
        width, height = (max(1, round(side / SIDE_MULTIPLE)) * SIDE_MULTIPLE for side in (wide, high))
        return width, height

    def load_image(self, sample: int) -> torch.Tensor:
        """The image as uint8 [C, H, W], cropped around its centre. Raises BrokenMediaError if it does not decode."""
        from supertuner.data.decode.image import decode_image

        width, height = self.image_size(self._bucket(sample))
        file = self.files[sample]
        with raising_broken_media(f"reference image {file}"):
            image = decode_image(memoryview(file.read_bytes()), (width, height))
        box = crop_box(image.shape[1], image.shape[0], width, height, 0.5, 0.5)
        return crop_and_resize(image, box, width, height, self.resize_filter).contiguous()

    def cache_key_bytes(self, sample: int) -> bytes:
        """Everything that determines the image: the file's bytes, the size, and the filter. Reads the file."""
        file_digest = xxhash.xxh3_128_digest(self.files[sample].read_bytes())
        size = self.image_size(self._bucket(sample))
        return file_digest + f" {REFERENCE_VERSION} {size} {self.resize_filter}".encode()

    def _bucket(self, sample: int) -> Bucket:
        return self.buckets[int(self.bucket_indices[sample])]


def find_reference_images(
    settings: DatasetSettings, samples: SampleCollection, members: BucketMembers
) -> ReferenceImages | None:
    """A dataset's reference images; None without `conditioning_dir`.

    Raises SourceError if a sample has none or a broken one.
    """
    if settings.conditioning_dir is None:
        return None
    key_path = f"datasets[{settings.id}].conditioning_dir"
    folder, names = list_sidecar_images(key_path, settings.conditioning_dir)
    keys = [samples.key(number) for number in range(len(samples))]
    missing_keys = [key for key in keys if key not in names]
    if missing_keys:
        raise SourceError(
            f"{key_path}: {len(missing_keys)} of {len(keys)} samples have no image in {folder} "
            f"({first_names(missing_keys)}); it must have the name of its sample, with any extension"
        )
    files = tuple(Path(folder) / names[key] for key in keys)
    for file in files:
        try:
            read_image_size(f"{key_path}: {file}", str(file))
        except BrokenMediaError as error:
            raise SourceError(f"{error}; repair it, or remove its sample") from error
    bucket_indices = np.zeros(len(samples), np.int32)
    for number in range(len(members.buckets)):
        bucket_indices[members.samples_in(number)] = number
    resolution = settings.conditioning_resolution
    return ReferenceImages(files, resolution, settings.resize_filter, members.buckets, bucket_indices)
