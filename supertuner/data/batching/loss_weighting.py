"""Masks of pictures and clips: which places of a sample count, cropped and mirrored as the sample is.

A mask is a picture of its own in another folder, with the sample's name: white counts, black does not, grey in between.
Of a clip it holds for every frame. Masks are not staged: each is read when its sample is used. What is wrong with one
by its header is told before anything is computed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from supertuner.core.errors import BrokenMediaError, SourceError
from supertuner.core.events import Sink, WarningEvent
from supertuner.data.batching.render import augmentation_for_sample
from supertuner.data.batching.resize import crop_and_resize, crop_box
from supertuner.data.corpus import CorpusDataset
from supertuner.data.decode import raising_broken_media
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.sidecar_images import list_sidecar_images, read_image_size
from supertuner.data.sources.listing import first_names

if TYPE_CHECKING:
    import torch

ASPECT_TOLERANCE = 0.02
"""How far a mask's ratio of sides may be from its sample's: rounding of a smaller mask, no more."""


@dataclass(frozen=True, eq=False, slots=True)
class LossMasks:
    """The masks of one dataset."""

    folder: str
    file_names: Mapping[str, str]
    """Sample → name of its mask's file below the folder."""
    min_weight: float
    """What places count that the mask leaves out."""
    digest: str
    """What the masks of all samples are known by: equal digests mean equal files."""

    def load_mask(self, seed: int, dataset: CorpusDataset, sample: int, cycle: int, bucket: Bucket) -> torch.Tensor:
        """What each place of the sample counts as the batch shows it: fp32 HW from `floor` to 1; without a mask, 1."""
        import torch

        file_name = self.file_names.get(dataset.samples.key(sample))
        if file_name is None:
            return torch.ones(bucket.height, bucket.width)
        from supertuner.data.decode.image import decode_image

        mask_path = os.path.join(self.folder, file_name)
        with raising_broken_media(f"mask {mask_path}"):
            picture = decode_image(memoryview(Path(mask_path).read_bytes()))
            height, width = picture.shape[:2]
            _require_same_aspect(width, height, dataset, sample)
        augmentation = augmentation_for_sample(seed, dataset, sample, cycle)
        box = crop_box(width, height, bucket.width, bucket.height, augmentation.crop_x, augmentation.crop_y)
        weights = crop_and_resize(picture, box, bucket.width, bucket.height, "area").float().mean(0) / 255
        return self.min_weight + (1 - self.min_weight) * (weights.flip(-1) if augmentation.flip else weights)


def find_loss_masks(dataset: CorpusDataset, sink: Sink) -> LossMasks | None:
    """A dataset's masks, if it has any. Samples without one are told; a folder that fits none is refused."""
    settings = dataset.settings
    if settings.mask_dir is None:
        return None
    key_path = f"datasets[{settings.id}].mask_dir"
    folder, names = list_sidecar_images(key_path, settings.mask_dir)
    keys = [dataset.samples.key(number) for number in range(len(dataset.samples))]
    missing_keys = [key for key in keys if key not in names]
    if keys and len(missing_keys) == len(keys):
        raise SourceError(
            f"{key_path}: none of the {len(names)} pictures in {folder} is named like a sample, such as {keys[0]!r}; "
            "a mask has the name of its sample, whatever its ending"
        )
    if missing_keys:
        shown = first_names(missing_keys, len(missing_keys))
        sink.emit(
            WarningEvent(
                key_path, f"{len(missing_keys)} of {len(keys)} samples have no mask, and all of each counts ({shown})"
            )
        )
    unused = sorted(names.keys() - set(keys))
    if unused:
        shown = first_names(unused, len(unused))
        sink.emit(
            WarningEvent(key_path, f"{len(unused)} of {len(names)} masks have no sample and are not used ({shown})")
        )
    digest = xxhash.xxh3_128()
    for sample, key in enumerate(keys):
        if key in names:
            file = os.path.join(folder, names[key])
            _require_valid_mask(key_path, file, dataset, sample)
            digest.update(f"{key}\n".encode(errors="surrogateescape"))
            digest.update(xxhash.xxh3_128_digest(Path(file).read_bytes()))
    return LossMasks(folder, names, settings.mask_floor, digest.hexdigest())


def _require_valid_mask(key_path: str, file: str, dataset: CorpusDataset, sample: int) -> None:
    """Refuse a mask now that its sample would stumble over, hours later."""
    name = f"{key_path}: {file}"
    try:
        size = read_image_size(name, file)
        with raising_broken_media(name):
            _require_same_aspect(*size, dataset, sample)
    except BrokenMediaError as error:
        raise SourceError(f"{error}; mend it, or remove it and all of its sample counts") from error


def _require_same_aspect(width: int, height: int, dataset: CorpusDataset, sample: int) -> None:
    sample_aspect = float(dataset.samples.width[sample]) / float(dataset.samples.height[sample])
    if abs(width / height / sample_aspect - 1) > ASPECT_TOLERANCE:
        shape = f"{dataset.samples.width[sample]} × {dataset.samples.height[sample]}"
        raise BrokenMediaError(f"is {width} × {height} and its sample {shape}: it covers another part")
