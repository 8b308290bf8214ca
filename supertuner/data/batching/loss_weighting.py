"""How much each sample, and each pixel of a sample, counts in the loss: weights from settings and files, and masks.

A mask is an image in another folder with its sample's name. White pixels count fully, black ones do not count, grey
ones count partly; a clip's mask applies to every frame. A mask is cropped and flipped as its sample is. Masks are not
staged: each is read when its sample is used. Masks with a broken header are refused before the run computes anything.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from numpy.typing import NDArray

from supertuner.config.settings.data import CaptionSettings
from supertuner.core.errors import BrokenMediaError, SourceError
from supertuner.core.events import Sink, WarningEvent
from supertuner.data.batching.render import augmentation_for_sample
from supertuner.data.corpus import CorpusDataset
from supertuner.data.corpus.sidecar_images import list_sidecar_images, read_image_size
from supertuner.data.decode import raising_broken_media
from supertuner.data.decode.resize import crop_and_resize, crop_box
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.sources import metadata
from supertuner.data.sources.listing import first_names

if TYPE_CHECKING:
    import torch

MAX_WEIGHT = 1_000_000
"""The same limit as `loss_weight` has: far larger weights overflow fp32, and the loss becomes infinite."""
ASPECT_TOLERANCE = 0.02
"""How far a mask's aspect ratio may differ from its sample's, relatively: no more than rounding of a smaller mask."""


def load_sample_weights(dataset: CorpusDataset) -> NDArray[np.float32] | None:
    """One weight per sample: `loss_weight` times the weight in `loss_weights_file` (1 for a sample that the file does
    not list). None if every sample has weight 1."""
    settings = dataset.settings
    if settings.loss_weights_file is None:
        dataset_weight = settings.loss_weight
        return None if dataset_weight == 1 else np.full(len(dataset.samples), dataset_weight, np.float32)
    file, key_path = settings.loss_weights_file, f"datasets[{settings.id}].loss_weights_file"
    columns = CaptionSettings(file_column=settings.captions.file_column, caption_column="weight")
    try:
        cells = metadata.parse_metadata(file, file.read_bytes(), columns).cells
    except OSError as error:
        raise SourceError(f"{key_path}: {file} cannot be read: {error.strerror}") from error
    except SourceError as error:
        need = f"it must be a .jsonl, .csv or .parquet file with the columns {columns.file_column!r} and 'weight'"
        raise SourceError(f"{key_path}: {str(error).partition('; set captions.')[0]}; {need}") from error
    weight_by_key = {os.path.splitext(name)[0]: _parse_weight(values, name, key_path) for name, values in cells.items()}
    keys = [dataset.samples.key(sample) for sample in range(len(dataset.samples))]
    if weight_by_key.keys().isdisjoint(keys):
        raise SourceError(f"{key_path}: no row of {file} names a sample, such as {keys[0]!r}")
    weights = np.array([weight_by_key.get(key, 1.0) for key in keys], np.float32)
    return weights * np.float32(settings.loss_weight)


def _parse_weight(cells: list[object], name: str, key_path: str) -> float:
    try:
        value = float(str(cells[0]))
    except ValueError:
        value = math.nan
    if len(set(map(str, cells))) > 1 or not (0 <= value <= MAX_WEIGHT):
        problem = f"the weight of {name!r} is {', '.join(map(repr, cells))}"
        raise SourceError(f"{key_path}: {problem}; it must be one number from 0 to {MAX_WEIGHT:,}")
    return value


@dataclass(frozen=True, eq=False, slots=True)
class LossMasks:
    """The masks of one dataset."""

    folder: str
    file_names: Mapping[str, str]
    """Key of a sample → name of its mask file below the folder."""
    min_weight: float
    """Weight of pixels that are black in the mask."""
    digest: str
    """Digest of the mask files of all samples: equal digests mean equal files."""

    def load_mask(self, seed: int, dataset: CorpusDataset, sample: int, cycle: int, bucket: Bucket) -> torch.Tensor:
        """Weight of each pixel of the sample as rendered in this cycle: fp32 [H, W] from `min_weight` to 1; all 1
        without a mask."""
        import torch

        file_name = self.file_names.get(dataset.samples.key(sample))
        if file_name is None:
            return torch.ones(bucket.height, bucket.width)
        from supertuner.data.decode.image import decode_image

        mask_path = os.path.join(self.folder, file_name)
        with raising_broken_media(f"mask {mask_path}"):
            image = decode_image(memoryview(Path(mask_path).read_bytes()))
            height, width = image.shape[:2]
            _require_same_aspect(width, height, dataset, sample)
        augmentation = augmentation_for_sample(seed, dataset, sample, cycle)
        box = crop_box(width, height, bucket.width, bucket.height, augmentation.crop_x, augmentation.crop_y)
        weights = crop_and_resize(image, box, bucket.width, bucket.height, "area").float().mean(0) / 255
        return self.min_weight + (1 - self.min_weight) * (weights.flip(-1) if augmentation.flip else weights)


def find_loss_masks(dataset: CorpusDataset, sink: Sink) -> LossMasks | None:
    """A dataset's masks; None without `mask_dir`. Emits a warning about samples without a mask and masks without a
    sample. Raises SourceError if no mask fits any sample, or if a mask is broken."""
    settings = dataset.settings
    if settings.mask_dir is None:
        return None
    key_path = f"datasets[{settings.id}].mask_dir"
    folder, names = list_sidecar_images(key_path, settings.mask_dir)
    keys = [dataset.samples.key(number) for number in range(len(dataset.samples))]
    missing_keys = [key for key in keys if key not in names]
    if keys and len(missing_keys) == len(keys):
        raise SourceError(
            f"{key_path}: none of the {len(names)} images in {folder} has the name of a sample, such as {keys[0]!r}; "
            "a mask must have the name of its sample, with any extension"
        )
    if missing_keys:
        text = f"{len(missing_keys)} of {len(keys)} samples have no mask; all their pixels count"
        sink.emit(WarningEvent(key_path, f"{text} ({first_names(missing_keys)})"))
    unused = sorted(names.keys() - set(keys))
    if unused:
        text = f"{len(unused)} of {len(names)} masks have no sample and are not used"
        sink.emit(WarningEvent(key_path, f"{text} ({first_names(unused)})"))
    digest = xxhash.xxh3_128()
    for sample, key in enumerate(keys):
        if key in names:
            file = os.path.join(folder, names[key])
            _require_valid_mask(key_path, file, dataset, sample)
            digest.update(f"{key}\n".encode(errors="surrogateescape"))
            digest.update(xxhash.xxh3_128_digest(Path(file).read_bytes()))
    return LossMasks(folder, names, settings.mask_floor, digest.hexdigest())


def _require_valid_mask(key_path: str, file: str, dataset: CorpusDataset, sample: int) -> None:
    """Raise SourceError now for a mask that would otherwise fail hours later, when its sample is used."""
    label = f"{key_path}: {file}"
    try:
        size = read_image_size(label, file)
        with raising_broken_media(label):
            _require_same_aspect(*size, dataset, sample)
    except BrokenMediaError as error:
        raise SourceError(f"{error}; repair it, or remove it so that its whole sample counts") from error


def _require_same_aspect(width: int, height: int, dataset: CorpusDataset, sample: int) -> None:
    sample_aspect = float(dataset.samples.width[sample]) / float(dataset.samples.height[sample])
    if abs(width / height / sample_aspect - 1) > ASPECT_TOLERANCE:
        shape = f"{dataset.samples.width[sample]} × {dataset.samples.height[sample]}"
        raise BrokenMediaError(f"is {width} × {height}, its sample is {shape}: the aspect ratios differ")
