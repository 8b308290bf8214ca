"""Draws a contact sheet: samples with captions; videos as strips of frames, audio as waveforms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from supertuner.sinks import drawing
from supertuner.sinks.drawing import ACCENT, CARD, INK, MUTED, RULE, load_font, new_sheet

if TYPE_CHECKING:
    from PIL.Image import Image

WIDTH, MARGIN, GAP = 1600, 40, 16
PICTURE_HEIGHT, STRIP_HEIGHT, WAVE_HEIGHT = 210, 112, 96
STRIP_FRAMES = 9
CAPTION_LINES = 3
LINE_HEIGHT = 17


@dataclass(frozen=True, slots=True)
class ContactSheetCell:
    """One sample with its caption."""

    media: NDArray[Any]
    """uint8 CHW of an image, uint8 CFHW of a video, float CT of audio."""
    caption: str
    file: str
    seconds: float = 0.0
    """Length of audio."""


@dataclass(frozen=True, slots=True)
class ContactSheetSection:
    title: str
    note: str
    cells: tuple[ContactSheetCell, ...]


def render_contact_sheet(title: str, note: str, sections: Sequence[ContactSheetSection]) -> Image:
    """The whole sheet as one picture; its height depends on its content."""
    blocks = [_render_heading(title, note), *(_render_section(section) for section in sections)]
    height = sum(block.height for block in blocks) + GAP * len(blocks) + MARGIN
    sheet, _ = new_sheet(WIDTH, height)
    top = 0
    for block in blocks:
        sheet.paste(block, (0, top))
        top += block.height + GAP
    return sheet


def _render_heading(title: str, note: str) -> Image:
    block, pen = new_sheet(WIDTH, 96)
    pen.text((MARGIN, 32), drawing.drawable_text(title), INK, load_font(28))
    pen.text((MARGIN, 70), drawing.drawable_text(note), MUTED, load_font(15))
    return block


def _render_section(section: ContactSheetSection) -> Image:
    cells = [_render_cell(cell) for cell in section.cells]
    rows: list[list[Image]] = [[]]
    left = 0
    for cell in cells:
        if rows[-1] and left + cell.width > WIDTH - 2 * MARGIN:
            rows.append([])
            left = 0
        rows[-1].append(cell)
        left += cell.width + GAP
    heights = [max(cell.height for cell in row) for row in rows]
    block, pen = new_sheet(WIDTH, 38 + sum(heights) + GAP * (len(rows) - 1))
    pen.rectangle((MARGIN, 4, MARGIN + 4, 24), fill=ACCENT)
    title = drawing.drawable_text(section.title)
    pen.text((MARGIN + 14, 3), title, INK, load_font(19))
    pen.text(
        (MARGIN + 26 + drawing.text_width(title, 19), 7), drawing.drawable_text(section.note), MUTED, load_font(15)
    )
    top = 38
    for row, height in zip(rows, heights, strict=True):
        left = MARGIN
        for cell in row:
            block.paste(CARD, (left, top, left + cell.width, top + height))
            block.paste(cell, (left, top))
            left += cell.width + GAP
        top += height + GAP
    return block


def _render_cell(cell: ContactSheetCell) -> Image:
    """A card with the sample's picture, its caption and its file name."""
    picture = {2: _render_waveform, 3: _render_image, 4: _render_clip}[cell.media.ndim](cell)
    width = max(picture.width, 150)
    lines = drawing.wrap_text(cell.caption or "(empty caption)", width, CAPTION_LINES)
    card, pen = new_sheet(width + 16, picture.height + 16 + LINE_HEIGHT * (len(lines) + 1) + 12, CARD)
    card.paste(picture, (8 + (width - picture.width) // 2, 8))
    top = picture.height + 16
    for line in lines:
        pen.text((8, top), line, INK if cell.caption else MUTED, load_font(13))
        top += LINE_HEIGHT
    pen.text((8, top + 2), drawing.wrap_text(cell.file, width, 1)[0], MUTED, load_font(12))
    return card


def _render_image(cell: ContactSheetCell) -> Image:
    return _thumbnail(cell.media.transpose(1, 2, 0), PICTURE_HEIGHT)


def _render_clip(cell: ContactSheetCell) -> Image:
    """A strip of evenly spaced frames, including the first and the last."""
    frames = cell.media.transpose(1, 2, 3, 0)
    fit = (WIDTH - 2 * MARGIN - 16) // (round(STRIP_HEIGHT * frames.shape[2] / frames.shape[1]) + 2)
    shown = np.unique(np.linspace(0, len(frames) - 1, min(STRIP_FRAMES, max(1, fit), len(frames))).round().astype(int))
    pictures = [_thumbnail(frames[number], STRIP_HEIGHT) for number in shown]
    strip, _ = new_sheet(sum(p.width + 2 for p in pictures) - 2, STRIP_HEIGHT, CARD)
    left = 0
    for picture in pictures:
        strip.paste(picture, (left, 0))
        left += picture.width + 2
    return strip


def _render_waveform(cell: ContactSheetCell) -> Image:
    """For each channel, the range of the samples in each pixel column."""
    width = 460
    picture, pen = new_sheet(width, WAVE_HEIGHT + 18, CARD)
    lane = WAVE_HEIGHT / len(cell.media)
    edges = np.linspace(0, cell.media.shape[1], width + 1).astype(int)
    for number, channel in enumerate(cell.media):
        middle = lane * (number + 0.5)
        pen.line((0, middle, width, middle), fill=RULE)
        for x, (begin, end) in enumerate(pairwise(edges)):
            part = np.clip(channel[begin : max(end, begin + 1)], -1, 1) * (lane / 2 - 2)
            pen.line((x, middle - float(part.max()), x, middle - float(part.min())), fill=ACCENT)
    pen.text((0, WAVE_HEIGHT + 2), "0 s", MUTED, load_font(12))
    length = f"{cell.seconds:g} s"
    pen.text((width - drawing.text_width(length, 12), WAVE_HEIGHT + 2), length, MUTED, load_font(12))
    return picture


def _thumbnail(picture_HWC: NDArray[Any], height: int) -> Image:
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(picture_HWC))
    width = max(1, round(picture.width * height / picture.height))
    return picture.resize((width, height), Image.Resampling.LANCZOS)
