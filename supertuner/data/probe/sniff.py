"""Detects a file's format from its first bytes, regardless of its name."""

from __future__ import annotations

from collections.abc import Mapping

from supertuner.core.types import MediaKind

HEAD_BYTES = 192
"""How many bytes `sniff` needs."""

KIND_BY_FORMAT: Mapping[str, MediaKind] = {
    **dict.fromkeys(("jpeg", "png", "webp"), MediaKind.IMAGE),
    **dict.fromkeys(("mp4", "matroska", "avi", "mpegts"), MediaKind.VIDEO),
    **dict.fromkeys(("wav", "flac", "ogg", "mp3", "aac"), MediaKind.AUDIO),
}
"""The usual kind of each format. MP4, Matroska and Ogg can contain audio, video or both: see `format_allows_kind`."""

KIND_BY_EXTENSION: Mapping[str, MediaKind] = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp"), MediaKind.IMAGE),
    **dict.fromkeys((".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".ts"), MediaKind.VIDEO),
    **dict.fromkeys((".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".m4a", ".aac"), MediaKind.AUDIO),
}
"""The kind for which a file is a candidate, by its extension. Its header then decides."""

UNSUPPORTED_EXTENSIONS = frozenset(
    (".gif", ".bmp", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jxl", ".jp2", ".tga", ".exr", ".psd")
) | frozenset((".wmv", ".flv", ".mpg", ".mpeg", ".3gp", ".aif", ".aiff", ".wma"))
"""Media formats that are not supported. A note reports such files, so that users know why they are missing."""

_VIDEO_OR_AUDIO_FORMATS = frozenset(("mp4", "matroska", "ogg"))

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\xff\xd8\xff", "jpeg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\x1a\x45\xdf\xa3", "matroska"),
    (b"fLaC", "flac"),
    (b"OggS", "ogg"),
    (b"ID3", "mp3"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tiff"),
    (b"MM\0*", "tiff"),
    (b"\0\0\0\x0cJXL ", "jpeg xl"),
    (b"\xff\x0a", "jpeg xl"),
    (b"%PDF", "pdf"),
    (b"PK\x03\x04", "zip"),
    (b"<!DOCTYPE", "html"),
    (b"<!doctype", "html"),
    (b"<html", "html"),
)
_RIFF_FORMATS = {b"WEBP": "webp", b"WAVE": "wav", b"AVI ": "avi"}
_STILL_BRANDS = {b"avif": "avif", b"avis": "avif", b"heic": "heic", b"mif1": "heic", b"heix": "heic"}


def sniff(head: bytes) -> str | None:
    """The format of a file that begins with `head` (HEAD_BYTES are enough); None if it is unknown."""
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[:4] in (b"RIFF", b"RF64"):
        return _RIFF_FORMATS.get(head[8:12])
    if head[4:8] == b"ftyp":
        return _STILL_BRANDS.get(head[8:12], "mp4")
    if head[4:8] in (b"moov", b"mdat", b"wide", b"free", b"skip"):  # QuickTime files older than the ftyp box
        return "mp4"
    return _sniff_audio(head)


def _sniff_audio(head: bytes) -> str | None:
    """MPEG audio has no magic number, only a sync word: eleven set bits, followed by a valid header."""
    if len(head) >= 2 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0:
        return "aac"
    if len(head) >= 3 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2 and head[2] >> 4 not in (0, 15):
        return "mp3"
    if head[:1] == b"\x47" and head[188:189] == b"\x47":  # every packet of 188 bytes begins with this byte
        return "mpegts"
    return None


def format_allows_kind(format: str, kind: MediaKind) -> bool:
    """Whether a dataset of `kind` can contain files of `format`."""
    if format in _VIDEO_OR_AUDIO_FORMATS:
        return kind in (MediaKind.VIDEO, MediaKind.AUDIO)
    return KIND_BY_FORMAT.get(format) is kind
