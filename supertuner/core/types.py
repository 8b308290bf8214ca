"""Small types that several rooms speak of; they carry no behaviour beyond their own arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TypeAlias

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

JSON: TypeAlias = bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"] | None
"""What can be written to a JSON file as it is."""


class MediaKind(StrEnum):
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


def bytes_text(nbytes: float) -> str:
    """A size for people: `3.1 GiB`, `640 KiB`, `12 B`. Binary units everywhere, so that sums agree."""
    for unit, factor in (("TiB", GIB * KIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= factor:
            value = nbytes / factor
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{nbytes:.0f} B"


def escape_for_terminal(text: str) -> str:
    """`text` in one line, with control characters as escapes: a file's name must not steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
