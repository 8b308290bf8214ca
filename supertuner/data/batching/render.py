"""One sample in one turn: its media, decoded and changed, written into its row of a batch, and its caption.

A function of the sample's bytes, its settings and chance; what else is in the batch, which thread does it and when
make no difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from supertuner.core.types import MediaKind
from supertuner.data.batching.augment import Change, apply_colour, change_for, colour_map
from supertuner.data.batching.captions import caption_for
from supertuner.data.batching.resize import crop_box, resized
from supertuner.data.batching.sample_rng import Chance
from supertuner.data.corpus import Part
from supertuner.data.decode import broken_means
from supertuner.data.decode.image import RGB
from supertuner.data.ordering.assign import block_of
from supertuner.data.ordering.buckets import Bucket, frames_available

if TYPE_CHECKING:
    import torch


def chance_of(seed: int, part: Part, sample: int, turn: int) -> Chance:
    return Chance(seed, part.samples.id, part.samples.key(sample), turn)


def caption_of(seed: int, part: Part, sample: int, turn: int) -> str:
    return caption_for(part.samples.captions(sample), part.settings.captions, chance_of(seed, part, sample, turn))


def change_of(seed: int, part: Part, sample: int, turn: int) -> Change:
    settings = part.settings
    return change_for(settings.augment, settings.crop == "random", chance_of(seed, part, sample, turn))


def render(seed: int, part: Part, sample: int, turn: int, bucket: Bucket, row: torch.Tensor) -> None:
    """Write the sample into `row`, which has the bucket's shape. Bytes that do not decode are a BrokenMedia.

    Whoever changes what comes out of the same bytes and settings raises `RENDER_VERSION` (data/content.py).
    """
    change = change_of(seed, part, sample, turn)
    if bucket.kind is MediaKind.AUDIO:
        _sound(part, sample, change, bucket, row)
    elif bucket.kind is MediaKind.VIDEO:
        for number, picture in enumerate(_clip(part, sample, change, bucket)):
            _picture(picture, part, change, bucket, row[:, number])
    else:
        _picture(_still(part, sample, bucket), part, change, bucket, row)


def _name(part: Part, sample: int) -> str:
    return f"datasets[{part.samples.id}], sample {part.samples.key(sample)!r}"


def _still(part: Part, sample: int, bucket: Bucket) -> RGB:
    from supertuner.data.decode.image import decode_image

    payload = part.samples.media(sample)
    with broken_means(_name(part, sample)):
        return decode_image(payload, (bucket.width, bucket.height))


def _clip(part: Part, sample: int, change: Change, bucket: Bucket) -> Iterator[RGB]:
    from supertuner.data.decode.video import decode_video

    fps = part.settings.fps
    one = block_of(part.samples, sample, sample + 1)
    spare = max(0, int(frames_available(one.frames, one.fps, fps)[0]) - bucket.frames)
    payload = part.samples.media(sample)
    with broken_means(_name(part, sample)):
        yield from decode_video(payload, round(change.along * spare), bucket.frames, fps)


def _sound(part: Part, sample: int, change: Change, bucket: Bucket, row_CT: torch.Tensor) -> None:
    import torch

    from supertuner.data.decode.audio import decode_audio

    spare_s = max(0.0, float(part.samples.seconds[sample]) - bucket.samples / bucket.sample_rate)
    payload = part.samples.media(sample)
    with broken_means(_name(part, sample)):
        sound = decode_audio(payload, change.along * spare_s, bucket.samples, bucket.sample_rate, bucket.channels)
    row_CT.copy_(torch.from_numpy(sound))


def _picture(picture: RGB, part: Part, change: Change, bucket: Bucket, row_CHW: torch.Tensor) -> None:
    height, width = picture.shape[:2]
    box = crop_box(width, height, bucket.width, bucket.height, change.across, change.down)
    scaled = resized(picture, box, bucket.width, bucket.height, part.settings.resize_filter)
    colours = colour_map(change)
    if colours is not None:
        apply_colour(scaled, colours)
    row_CHW.copy_(scaled.flip(-1) if change.flip else scaled)
