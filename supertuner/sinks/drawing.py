"""What every picture for people is drawn with: one font, a few colours, text that fits. The same text, the same pixels.

The font is the one that comes with Pillow, so that pictures are alike on every machine. It knows ASCII and little more:
accents are dropped, signs that have a plain cousin become it, and every other letter is shown as an empty box.
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

# What the font has beyond ASCII; from `test_the_font_has_the_signs_that_are_kept`.
FONT_CHARACTERS: Final = frozenset("©«°±´·»‘’“”…‹›⁄™")
CHARACTER_REPLACEMENTS: Final[Mapping[str, str]] = {
    "×": " x ", "–": "-", "—": "-", "−": "-", "‐": "-", "‑": "-", "→": "->", "←": "<-", "≤": "<=", "≥": ">=",
    "≈": "~", "•": "·", "„": '"', "‚": "'", "ß": "ss", "æ": "ae", "Æ": "AE", "ø": "o", "Ø": "O", "œ": "oe", "ł": "l",
    "Ł": "L", "đ": "d", "ı": "i",
}  # fmt: skip


def drawable_text(text: str) -> str:
    """`text` in one line, of signs that the font has; any other letter becomes one that it draws as an empty box."""
    return "".join(_drawable_character(character) for character in " ".join(text.split()))


def _drawable_character(character: str) -> str:
    if character in FONT_CHARACTERS or " " <= character <= "~":
        return character
    if character in CHARACTER_REPLACEMENTS:
        return CHARACTER_REPLACEMENTS[character]
    parts = [s for s in unicodedata.normalize("NFKD", character) if not unicodedata.combining(s)]
    if all(s in FONT_CHARACTERS or " " <= s <= "~" for s in parts):
        return "".join(parts)  # an accent by itself leaves nothing
    return "" if unicodedata.category(character) in ("Cf", "Cc", "Mn") else "\u25a1"


@lru_cache(maxsize=8)
def load_font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def text_width(text: str, size: int) -> int:
    return int(-(-load_font(size).getlength(text) // 1))


def wrap_text(text: str, width: int, max_lines: int, size: int = 13) -> list[str]:
    """`text` in at most `most` lines of `width` pixels; an ellipsis says that there is more."""
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
    """As much of `line` as fits; an ellipsis stands for the rest."""
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
    """An empty sheet, and the pen for it."""
    from PIL import Image, ImageDraw

    sheet = Image.new("RGB", (width, height), colour)
    return sheet, ImageDraw.Draw(sheet)


def png_bytes(picture: Image) -> bytes:
    """The picture as a PNG file: the same pixels, the same bytes."""
    buffer = BytesIO()
    picture.save(buffer, format="PNG", compress_level=6)
    return buffer.getvalue()
