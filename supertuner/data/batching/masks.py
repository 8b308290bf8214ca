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

from supertuner.core.errors import BrokenMedia, SourceError
from supertuner.core.events import Sink, Warned
from supertuner.data.batching.render import change_of
from supertuner.data.batching.resize import crop_box, resized
from supertuner.data.corpus import Part
from supertuner.data.decode import broken_means
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.sidecar_images import pictures_in, size_of
from supertuner.data.sources.listing import first_names

if TYPE_CHECKING:
    import torch

SKEW = 0.02
"""How far a mask's ratio of sides may be from its sample's: rounding of a smaller mask, no more."""


@dataclass(frozen=True, eq=False, slots=True)
class Masks:
    """The masks of one dataset."""

    folder: str
    names: Mapping[str, str]
    """Sample → name of its mask's file below the folder."""
    floor: float
    """What places count that the mask leaves out."""
    digest: str
    """What the masks of all samples are known by: equal digests mean equal files."""

    def draw(self, seed: int, part: Part, sample: int, turn: int, bucket: Bucket) -> torch.Tensor:
        """What each place of the sample counts as the batch shows it: fp32 HW from `floor` to 1; without a mask, 1."""
        import torch

        name = self.names.get(part.samples.key(sample))
        if name is None:
            return torch.ones(bucket.height, bucket.width)
        from supertuner.data.decode.image import decode_image

        place = os.path.join(self.folder, name)
        with broken_means(f"mask {place}"):
            picture = decode_image(memoryview(Path(place).read_bytes()))
            height, width = picture.shape[:2]
            _covers(width, height, part, sample)
        change = change_of(seed, part, sample, turn)
        box = crop_box(width, height, bucket.width, bucket.height, change.across, change.down)
        shown = resized(picture, box, bucket.width, bucket.height, "area").float().mean(0) / 255
        return self.floor + (1 - self.floor) * (shown.flip(-1) if change.flip else shown)


def masks_of(part: Part, sink: Sink) -> Masks | None:
    """A dataset's masks, if it has any. Samples without one are told; a folder that fits none is refused."""
    settings = part.settings
    if settings.mask_dir is None:
        return None
    place = f"datasets[{settings.id}].mask_dir"
    folder, names = pictures_in(place, settings.mask_dir)
    keys = [part.samples.key(number) for number in range(len(part.samples))]
    without = [key for key in keys if key not in names]
    if keys and len(without) == len(keys):
        raise SourceError(
            f"{place}: none of the {len(names)} pictures in {folder} is named like a sample, such as {keys[0]!r}; "
            "a mask has the name of its sample, whatever its ending"
        )
    if without:
        shown = first_names(without, len(without))
        sink.emit(
            Warned(place, f"{len(without)} of {len(keys)} samples have no mask, and all of each counts ({shown})")
        )
    unused = sorted(names.keys() - set(keys))
    if unused:
        shown = first_names(unused, len(unused))
        sink.emit(Warned(place, f"{len(unused)} of {len(names)} masks have no sample and are not used ({shown})"))
    digest = xxhash.xxh3_128()
    for sample, key in enumerate(keys):
        if key in names:
            file = os.path.join(folder, names[key])
            _check(place, file, part, sample)
            digest.update(f"{key}\n".encode(errors="surrogateescape"))
            digest.update(xxhash.xxh3_128_digest(Path(file).read_bytes()))
    return Masks(folder, names, settings.mask_floor, digest.hexdigest())


def _check(place: str, file: str, part: Part, sample: int) -> None:
    """Refuse a mask now that its sample would stumble over, hours later."""
    name = f"{place}: {file}"
    try:
        size = size_of(name, file)
        with broken_means(name):
            _covers(*size, part, sample)
    except BrokenMedia as error:
        raise SourceError(f"{error}; mend it, or remove it and all of its sample counts") from error


def _covers(width: int, height: int, part: Part, sample: int) -> None:
    own = float(part.samples.width[sample]) / float(part.samples.height[sample])
    if abs(width / height / own - 1) > SKEW:
        shape = f"{part.samples.width[sample]} × {part.samples.height[sample]}"
        raise BrokenMedia(f"is {width} × {height} and its sample {shape}: it covers another part")
