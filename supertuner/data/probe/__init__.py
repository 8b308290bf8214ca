"""Detects a file's real format and reads its metadata from its bytes. Raises BrokenMediaError for an unusable file."""

from __future__ import annotations

from supertuner.core.errors import BrokenMediaError
from supertuner.core.types import MediaKind
from supertuner.data.probe.audio import probe_audio
from supertuner.data.probe.image import JPEG_HEAD_BYTES, probe_jpeg, probe_png, probe_webp
from supertuner.data.probe.media_info import MediaInfo
from supertuner.data.probe.sniff import HEAD_BYTES, format_allows_kind, sniff
from supertuner.data.probe.video import probe_video

_ACCEPTED_FORMATS = {
    MediaKind.IMAGE: "JPEG, PNG or WebP",
    MediaKind.VIDEO: "MP4, MOV, MKV, WebM, AVI or TS",
    MediaKind.AUDIO: "WAV, FLAC, OGG, MP3 or AAC",
}


def probe(payload: memoryview, kind: MediaKind) -> MediaInfo:
    """Metadata of a complete file that should be of `kind`. Nothing is decoded; an image takes microseconds."""
    head = bytes(payload[:JPEG_HEAD_BYTES])
    if kind is MediaKind.IMAGE and head.startswith(b"\xff\xd8\xff"):
        return probe_jpeg(payload, head)
    format = sniff(head[:HEAD_BYTES])
    if format is None or not format_allows_kind(format, kind):
        actual_type = "of an unknown type" if format is None else f"really {format}"
        raise BrokenMediaError(f"wrong type: it is {actual_type}; {kind} must be {_ACCEPTED_FORMATS[kind]}")
    if kind is MediaKind.IMAGE:
        return (probe_png if format == "png" else probe_webp)(payload)
    return (probe_video if kind is MediaKind.VIDEO else probe_audio)(format, payload)
