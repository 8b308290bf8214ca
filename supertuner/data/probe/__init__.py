"""Detects a file's real format and reads its metadata from its bytes. Raises BrokenMediaError for an unusable file."""

from __future__ import annotations

from supertuner.core.errors import BrokenMediaError
from supertuner.core.types import MediaKind
from supertuner.data.probe.image import JPEG_HEAD_BYTES, probe_jpeg, probe_png, probe_webp
from supertuner.data.probe.media_info import MediaInfo
from supertuner.data.probe.sniff import HEAD_BYTES, format_allows_kind, sniff

_IMAGE_PROBES = {"png": probe_png, "webp": probe_webp}


def probe(payload: memoryview, kind: MediaKind) -> MediaInfo:
    """Metadata of a complete file that should be of `kind`. Nothing is decoded; an image takes microseconds."""
    head = bytes(payload[:JPEG_HEAD_BYTES])
    if kind is MediaKind.IMAGE and head.startswith(b"\xff\xd8\xff"):
        return probe_jpeg(payload, head)
    format = sniff(head[:HEAD_BYTES])
    if format is None or not format_allows_kind(format, kind):
        raise BrokenMediaError(_wrong_type_message(format, kind))
    image_probe = _IMAGE_PROBES.get(format)
    if image_probe is not None:
        return image_probe(payload)
    return _probe_video_or_audio(format, payload, kind)


def _probe_video_or_audio(format: str, payload: memoryview, kind: MediaKind) -> MediaInfo:
    """Imports PyAV or libsndfile only here, so that image datasets never load them."""
    if kind is MediaKind.VIDEO:
        from supertuner.data.probe import video

        return video.probe_video(format, payload)
    from supertuner.data.probe import audio

    return audio.probe_audio(format, payload)


def _wrong_type_message(format: str | None, kind: MediaKind) -> str:
    accepted_formats = {
        "image": "JPEG, PNG or WebP",
        "video": "MP4, MOV, MKV, WebM, AVI or TS",
        "audio": "WAV, FLAC, OGG, MP3 or AAC",
    }
    actual_type = "of an unknown type" if format is None else f"really {format}"
    return f"wrong type: it is {actual_type}; {kind} must be {accepted_formats[kind]}"
