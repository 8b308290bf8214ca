"""Small types and text formats that several packages share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TypeAlias

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

JSON: TypeAlias = bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"] | None
"""A value that can be written to a JSON file."""


class MediaKind(StrEnum):
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


def bytes_text(nbytes: float) -> str:
    """A size for people, in binary units: `3.1 GiB`, `640 KiB`, `12 B`."""
    for unit, factor in (("TiB", GIB * KIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= factor:
            value = nbytes / factor
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{nbytes:.0f} B"


def escape_for_terminal(text: str) -> str:
    """`text` in one line with control characters escaped, so that a file name cannot control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def escape_lines(text: str) -> str:
    """`escape_for_terminal` for each line of a message."""
    return "\n".join(map(escape_for_terminal, text.split("\n")))


def hide_tokens(text: str) -> str:
    """`text` without tokens of the Hugging Face hub, for files and messages that may quote what a user wrote."""
    return re.sub(r"\bhf_[A-Za-z0-9]{16,}", "hf_(token removed)", text)
