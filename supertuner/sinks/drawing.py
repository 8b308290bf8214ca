"""Fonts, colours and text layout of pictures. The same text gives the same pixels on every machine.

The font is the one that Pillow contains. It has ASCII and a few more characters: accents are dropped, some characters
are replaced by similar ones, and every other character is drawn as an empty box.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

PAPER, CARD, INK, MUTED, ACCENT = "#f4f3ef", "#ffffff", "#22252b", "#7d828c", "#2f6fb3"
RULE = "#dcdad3"

# Characters of the font beyond ASCII, as checked by `test_the_font_has_the_characters_that_are_kept`.
FONT_CHARACTERS: Final = frozenset("©«°±´·»‘’“”…‹›⁄™")
CHARACTER_REPLACEMENTS: Final[Mapping[str, str]] = {
    "×": " x ", "–": "-", "—": "-", "−": "-", "‐": "-", "‑": "-", "→": "->", "←": "<-", "≤": "<=", "≥": ">=",
    "≈": "~", "•": "·", "„": '"', "‚": "'", "ß": "ss", "æ": "ae", "Æ": "AE", "ø": "o", "Ø": "O", "œ": "oe", "ł": "l",
    "Ł": "L", "đ": "d", "ı": "i",
}  # fmt: skip


def drawable_text(text: str) -> str:
    """`text` in one line, with only characters that the font has; others become one that is drawn as an empty box."""
    return "".join(_drawable_character(character) for character in " ".join(text.split()))


def _drawable_character(character: str) -> str:
    if character in FONT_CHARACTERS or " " <= character <= "~":
        return character
    if character in CHARACTER_REPLACEMENTS:
        return CHARACTER_REPLACEMENTS[character]
    parts = [s for s in unicodedata.normalize("NFKD", character) if not unicodedata.combining(s)]
    if all(s in FONT_CHARACTERS or " " <= s <= "~" for s in parts):
        return "".join(parts)  # a combining accent alone becomes ""
    return "" if unicodedata.category(character) in ("Cf", "Cc", "Mn") else "\u25a1"


@lru_cache(maxsize=8)
def load_font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def text_width(text: str, size: int) -> int:
    return int(-(-load_font(size).getlength(text) // 1))


def wrap_text(text: str, width: int, max_lines: int, size: int = 13) -> list[str]:
    """`text` in at most `max_lines` lines of `width` pixels; an ellipsis marks omitted text."""
    lines = [""]
    for word in drawable_text(text).split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if load_font(size).getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    visible_lines = lines[:max_lines]
    if len(lines) > max_lines:
        visible_lines[-1] += " …"
    return [shorten_line(line, width, size) for line in visible_lines]


def shorten_line(line: str, width: int, size: int = 13) -> str:
    """As much of `line` as fits into `width` pixels, followed by an ellipsis if something is omitted."""
    if load_font(size).getlength(line) <= width:
        return line
    low, high = 0, len(line)
    while low < high:
        middle = (low + high + 1) // 2
        if load_font(size).getlength(line[:middle] + "…") <= width:
            low = middle
        else:
            high = middle - 1
    return line[:low] + "…"


def new_sheet(width: int, height: int, colour: str = PAPER) -> tuple[Image, ImageDraw]:
    """An empty image, and its ImageDraw."""
    from PIL import Image, ImageDraw

    sheet = Image.new("RGB", (width, height), colour)
    return sheet, ImageDraw.Draw(sheet)


def png_bytes(picture: Image) -> bytes:
    """The picture as a PNG file. Equal pixels give equal bytes."""
    buffer = BytesIO()
    picture.save(buffer, format="PNG", compress_level=6)
    return buffer.getvalue()
