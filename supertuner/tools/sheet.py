"""Draws a contact sheet: samples with their captions; pictures, clips as strips of frames, sounds as waves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

WIDTH, MARGIN, GAP = 1600, 40, 16
PICTURE_HEIGHT, STRIP_HEIGHT, WAVE_HEIGHT = 210, 112, 96
STRIP_FRAMES = 9
PAPER, CARD, INK, QUIET, ACCENT = "#f4f3ef", "#ffffff", "#22252b", "#7d828c", "#2f6fb3"
CAPTION_LINES = 3
LINE = 17


@dataclass(frozen=True, slots=True)
class Cell:
    """One sample of a section."""

    media: NDArray[Any]
    """uint8 CHW of a picture, uint8 CFHW of a clip, float CT of a sound."""
    caption: str
    file: str
    seconds: float = 0.0
    """Sound: how long it is."""


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    note: str
    cells: tuple[Cell, ...]


def draw_sheet(title: str, note: str, sections: Sequence[Section]) -> Image:
    """The sheet as one picture, as tall as it has to be."""
    from PIL import Image

    blocks = [_heading(title, note), *(_section(section) for section in sections)]
    height = sum(block.height for block in blocks) + GAP * len(blocks) + MARGIN
    sheet = Image.new("RGB", (WIDTH, height), PAPER)
    top = 0
    for block in blocks:
        sheet.paste(block, (0, top))
        top += block.height + GAP
    return sheet


def _heading(title: str, note: str) -> Image:
    block, pen = _blank(96)
    pen.text((MARGIN, 32), title, INK, _font(28))
    pen.text((MARGIN, 70), note, QUIET, _font(15))
    return block


def _section(section: Section) -> Image:
    cells = [_cell(cell) for cell in section.cells]
    rows: list[list[Image]] = [[]]
    left = 0
    for cell in cells:
        if rows[-1] and left + cell.width > WIDTH - 2 * MARGIN:
            rows.append([])
            left = 0
        rows[-1].append(cell)
        left += cell.width + GAP
    heights = [max(cell.height for cell in row) for row in rows]
    block, pen = _blank(38 + sum(heights) + GAP * (len(rows) - 1))
    pen.rectangle((MARGIN, 4, MARGIN + 4, 24), fill=ACCENT)
    title = section.title.replace("×", " x ")  # the font that comes with Pillow has no multiplication sign
    pen.text((MARGIN + 14, 3), title, INK, _font(19))
    pen.text((MARGIN + 26 + _font(19).getlength(title), 7), section.note, QUIET, _font(15))
    top = 38
    for row, height in zip(rows, heights, strict=True):
        left = MARGIN
        for cell in row:
            block.paste(CARD, (left, top, left + cell.width, top + height))
            block.paste(cell, (left, top))
            left += cell.width + GAP
        top += height + GAP
    return block


def _cell(cell: Cell) -> Image:
    """The sample's picture over its caption and file name, on a card."""
    from PIL import Image, ImageDraw

    picture = {2: _wave, 3: _still, 4: _strip}[cell.media.ndim](cell)
    width = max(picture.width, 150)
    lines = wrapped(cell.caption or "(empty caption)", width, CAPTION_LINES)
    card = Image.new("RGB", (width + 16, picture.height + 16 + LINE * (len(lines) + 1) + 12), CARD)
    card.paste(picture, (8 + (width - picture.width) // 2, 8))
    pen = ImageDraw.Draw(card)
    top = picture.height + 16
    for line in lines:
        pen.text((8, top), line, INK if cell.caption else QUIET, _font(13))
        top += LINE
    pen.text((8, top + 2), wrapped(cell.file, width, 1)[0], QUIET, _font(12))
    return card


def _still(cell: Cell) -> Image:
    return _thumbnail(cell.media.transpose(1, 2, 0), PICTURE_HEIGHT)


def _strip(cell: Cell) -> Image:
    """Frames from the first to the last, evenly spaced, with what lies between left out."""
    from PIL import Image

    frames = cell.media.transpose(1, 2, 3, 0)
    fit = (WIDTH - 2 * MARGIN - 16) // (round(STRIP_HEIGHT * frames.shape[2] / frames.shape[1]) + 2)
    shown = np.unique(np.linspace(0, len(frames) - 1, min(STRIP_FRAMES, max(1, fit), len(frames))).round().astype(int))
    pictures = [_thumbnail(frames[number], STRIP_HEIGHT) for number in shown]
    strip = Image.new("RGB", (sum(p.width + 2 for p in pictures) - 2, STRIP_HEIGHT), CARD)
    left = 0
    for picture in pictures:
        strip.paste(picture, (left, 0))
        left += picture.width + 2
    return strip


def _wave(cell: Cell) -> Image:
    """Each channel as the range between its lowest and highest sample under each column of pixels."""
    from PIL import Image, ImageDraw

    width = 460
    picture = Image.new("RGB", (width, WAVE_HEIGHT + 18), CARD)
    pen = ImageDraw.Draw(picture)
    lane = WAVE_HEIGHT / len(cell.media)
    edges = np.linspace(0, cell.media.shape[1], width + 1).astype(int)
    for number, channel in enumerate(cell.media):
        middle = lane * (number + 0.5)
        pen.line((0, middle, width, middle), fill="#dcdad3")
        for x, (begin, end) in enumerate(pairwise(edges)):
            part = np.clip(channel[begin : max(end, begin + 1)], -1, 1) * (lane / 2 - 2)
            pen.line((x, middle - float(part.max()), x, middle - float(part.min())), fill=ACCENT)
    pen.text((0, WAVE_HEIGHT + 2), "0 s", QUIET, _font(12))
    length = f"{cell.seconds:g} s"
    pen.text((width - _font(12).getlength(length), WAVE_HEIGHT + 2), length, QUIET, _font(12))
    return picture


def _thumbnail(picture_HWC: NDArray[Any], height: int) -> Image:
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(picture_HWC))
    width = max(1, round(picture.width * height / picture.height))
    return picture.resize((width, height), Image.Resampling.LANCZOS)


def wrapped(text: str, width: int, most: int) -> list[str]:
    """`text` in at most `most` lines of `width` pixels; an ellipsis says that there is more."""
    font = _font(13)
    lines, words = [""], " ".join(text.split()).split(" ")
    for word in words:
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    cut = lines[:most]
    if len(lines) > most:
        cut[-1] += " …"
    return [_shortened(line, width) for line in cut]


def _shortened(line: str, width: int) -> str:
    font = _font(13)
    if font.getlength(line) <= width:
        return line
    while line and font.getlength(line + "…") > width:
        line = line[:-1]
    return line + "…"


def _blank(height: int) -> tuple[Image, ImageDraw]:
    from PIL import Image, ImageDraw

    block = Image.new("RGB", (WIDTH, height), PAPER)
    return block, ImageDraw.Draw(block)


@lru_cache(maxsize=8)
def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)
