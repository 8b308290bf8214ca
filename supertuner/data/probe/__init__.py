"""What a file is and whether it is whole, from its bytes in memory; what is wrong with it is a BrokenMedia."""

from __future__ import annotations

from supertuner.core.errors import BrokenMediaError
from supertuner.core.types import MediaKind
from supertuner.data.probe import jpeg, png, webp
from supertuner.data.probe.media_info import MediaInfo
from supertuner.data.probe.sniff import HEAD_BYTES, format_allows_kind, sniff

_IMAGE_PROBES = {"png": png.probe_png, "webp": webp.probe_webp}


def probe(payload: memoryview, kind: MediaKind) -> MediaInfo:
    """Facts of a whole file that should be of `kind`. Pictures cost microseconds; nothing is decoded."""
    head = bytes(payload[: jpeg.HEAD_BYTES])
    if kind is MediaKind.IMAGE and head.startswith(b"\xff\xd8\xff"):
        return jpeg.probe_jpeg(payload, head)
    format = sniff(head[:HEAD_BYTES])
    if format is None or not format_allows_kind(format, kind):
        raise BrokenMediaError(_wrong_type_message(format, kind))
    image_probe = _IMAGE_PROBES.get(format)
    if image_probe is not None:
        return image_probe(payload)
    return _probe_video_or_audio(format, payload, kind)


def _probe_video_or_audio(format: str, payload: memoryview, kind: MediaKind) -> MediaInfo:
    """Video and sound need PyAV and libsndfile, which picture datasets never load."""
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
    actual_type = "of a type nobody here knows" if format is None else f"really {format}"
    return f"wrong type: it is {actual_type}; {kind} must be {accepted_formats[kind]}"
