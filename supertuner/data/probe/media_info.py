"""MediaInfo: the metadata of a media file, and the image size above which files are refused."""

from __future__ import annotations

from typing import NamedTuple

from supertuner.core.errors import BrokenMediaError

MAX_PIXELS = 178_956_970
"""Pillow's threshold for decompression bombs, so that an accepted image does not fail in Pillow."""
MAX_SIDE = 65_535
AV_AUDIO_FORMATS = ("mp4", "matroska", "aac")
"""Audio formats that PyAV reads; libsndfile reads the others."""


class MediaInfo(NamedTuple):
    """A tuple, because datasets have millions of files with one each. 0: the field has no meaning for this kind."""

    format: str
    """The real format, whatever the file's name says: `jpeg`, `png`, `webp`, `mp4`, `wav` …"""
    width: int = 0
    """As displayed, after EXIF orientation or the video's rotation."""
    height: int = 0
    orientation: int = 1
    """EXIF orientation, 1 to 8, that the decoder must apply to get the displayed image."""
    frames: int = 0
    """Frames of a video, or samples per channel of audio."""
    fps: float = 0.0
    seconds: float = 0.0
    sample_rate: int = 0
    channels: int = 0


def image_info(format: str, width: int, height: int, orientation: int) -> MediaInfo:
    """Metadata of an image stored as `width` × `height`. Raises BrokenMediaError for empty images and bombs."""
    if not (width and height):
        raise BrokenMediaError(f"its header states {width}×{height} pixels")
    if width * height > MAX_PIXELS or width > MAX_SIDE or height > MAX_SIDE:
        limit = f"{MAX_PIXELS / 1e6:.0f} million"
        raise BrokenMediaError(f"would decode to {width}×{height} pixels, more than {limit} (decompression bomb?)")
    if orientation >= 5:  # the four orientations that swap width and height
        width, height = height, width
    return MediaInfo(format, width, height, orientation, 1)
