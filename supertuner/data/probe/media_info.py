"""What a media file says about itself, and the size beyond which we refuse to decode it."""

from __future__ import annotations

from typing import NamedTuple

from supertuner.core.errors import BrokenMediaError

MAX_PIXELS = 178_956_970
"""Pillow's own threshold for a decompression bomb: what passes here does not fail there."""
MAX_SIDE = 65_535


class MediaInfo(NamedTuple):
    """A tuple, because one is made per file of datasets with millions of them. Zero means: has no meaning here."""

    format: str
    """The real format, whatever the file's name says: `jpeg`, `png`, `webp`, `mp4`, `wav` …"""
    width: int = 0
    """As displayed: EXIF orientation and a video's rotation are applied."""
    height: int = 0
    orientation: int = 1
    """EXIF orientation, 1 to 8, that the decoder must apply to get the displayed picture."""
    frames: int = 0
    """Pictures of a video, or samples per channel of audio."""
    fps: float = 0.0
    seconds: float = 0.0
    sample_rate: int = 0
    channels: int = 0


def image_info(format: str, width: int, height: int, orientation: int) -> MediaInfo:
    """Facts of a still picture stored as `width` × `height`; refuses none, nothing, and bombs."""
    if not (width and height):
        raise BrokenMediaError(f"says it is {width}×{height} pixels")
    if width * height > MAX_PIXELS or width > MAX_SIDE or height > MAX_SIDE:
        raise BrokenMediaError(
            f"would decode to {width}×{height} pixels, more than {MAX_PIXELS / 1e6:.0f} million (decompression bomb?)"
        )
    if orientation >= 5:  # the four orientations that exchange the sides
        return MediaInfo(format, height, width, orientation, 1)
    return MediaInfo(format, width, height, orientation, 1)
