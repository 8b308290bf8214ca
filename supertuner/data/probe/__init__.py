"""What a file is and whether it is whole, from its bytes in memory; what is wrong with it is a BrokenMedia."""

from __future__ import annotations

from supertuner.core.errors import BrokenMedia
from supertuner.core.types import MediaKind
from supertuner.data.probe import jpeg, png, webp
from supertuner.data.probe.facts import Facts
from supertuner.data.probe.sniff import HEAD_BYTES, may_be, sniff

_PICTURES = {"png": png.facts, "webp": webp.facts}


def probe(payload: memoryview, kind: MediaKind) -> Facts:
    """Facts of a whole file that should be of `kind`. Pictures cost microseconds; nothing is decoded."""
    head = bytes(payload[: jpeg.HEAD_BYTES])
    if kind is MediaKind.IMAGE and head.startswith(b"\xff\xd8\xff"):
        return jpeg.facts(payload, head)
    format = sniff(head[:HEAD_BYTES])
    if format is None or not may_be(format, kind):
        raise BrokenMedia(_wrong(format, kind))
    still = _PICTURES.get(format)
    if still is not None:
        return still(payload)
    return _moving(format, payload, kind)


def _moving(format: str, payload: memoryview, kind: MediaKind) -> Facts:
    """Video and sound need PyAV and libsndfile, which picture datasets never load."""
    if kind is MediaKind.VIDEO:
        from supertuner.data.probe import video

        return video.facts(format, payload)
    from supertuner.data.probe import audio

    return audio.facts(format, payload)


def _wrong(format: str | None, kind: MediaKind) -> str:
    known = {
        "image": "JPEG, PNG or WebP",
        "video": "MP4, MOV, MKV, WebM, AVI or TS",
        "audio": "WAV, FLAC, OGG, MP3 or AAC",
    }
    what = "of a type nobody here knows" if format is None else f"really {format}"
    return f"wrong type: it is {what}; {kind} must be {known[kind]}"
