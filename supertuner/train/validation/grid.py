"""Draws samples in a labelled grid, a row per prompt and a column per seed: as an image, and as frames of a video.

The layout follows from counts and sizes alone; samples are then added one by one, and only their drawn pixels are kept.
Small samples are enlarged by whole factors without smoothing; large ones are scaled down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from supertuner.sinks import drawing

if TYPE_CHECKING:
    from PIL.Image import Image

Frame: TypeAlias = NDArray[np.uint8]
"""An RGB image, HWC."""

MARGIN, GAP, FRAME_GAP = 24, 8, 2
LABEL_WIDTH, LINE_HEIGHT = 240, 18
TITLE_HEIGHT, COLUMN_HEAD_HEIGHT = 64, 26
PREFERRED_SIDE, PREFERRED_SIDE_IN_STRIP = 256, 144
MIN_SIDE = 8
MIN_LABEL_LINES = 3
"""Each row has space for this many lines of its prompt, even if the samples are smaller."""


@dataclass(frozen=True, slots=True)
class SheetBounds:
    """The largest size of a sheet, as far as samples can be scaled down for it."""

    width: int
    height: int


IMAGE_BOUNDS = SheetBounds(2400, 12_000)
VIDEO_BOUNDS = SheetBounds(1920, 1200)


@dataclass(frozen=True, slots=True)
class GridLabels:
    title: str
    note: str
    prompts: Sequence[str]
    seeds: Sequence[int]


@dataclass(frozen=True, slots=True)
class GridLayout:
    """The positions of all cells on the sheet."""

    prompts: int
    seeds: int
    cell_width: int
    cell_height: int

    @property
    def size(self) -> tuple[int, int]:
        width = MARGIN + LABEL_WIDTH + self.seeds * (self.cell_width + GAP) - GAP + MARGIN
        height = TITLE_HEIGHT + COLUMN_HEAD_HEIGHT + self.prompts * (self.row_height + GAP) - GAP + MARGIN
        return width + width % 2, height + height % 2  # even, as video codecs need it

    @property
    def row_height(self) -> int:
        return max(self.cell_height, LINE_HEIGHT * MIN_LABEL_LINES)

    def corner(self, prompt: int, seed: int) -> tuple[int, int]:
        left = MARGIN + LABEL_WIDTH + seed * (self.cell_width + GAP)
        return left, TITLE_HEIGHT + COLUMN_HEAD_HEIGHT + prompt * (self.row_height + GAP)


def plan_grid(prompts: int, seeds: int, width: int, height: int, frames: int, bounds: SheetBounds) -> GridLayout:
    """A layout whose cells show `frames` frames of this size side by side; enlarged by whole factors only."""
    strip_width = frames * (width + FRAME_GAP) - FRAME_GAP
    across = (bounds.width - 2 * MARGIN - LABEL_WIDTH + GAP) / seeds - GAP
    down = (bounds.height - TITLE_HEIGHT - COLUMN_HEAD_HEIGHT - MARGIN + GAP) / prompts - GAP
    preferred_factor = (PREFERRED_SIDE if frames == 1 else PREFERRED_SIDE_IN_STRIP) / max(width, height)
    factor = min(across / strip_width, down / height, max(1.0, preferred_factor))
    if factor >= 1:
        factor = float(floor(factor))
    return GridLayout(prompts, seeds, *(max(MIN_SIDE, floor(side * factor)) for side in (strip_width, height)))


class ImageGrid:
    """The grid as an image. A cell shows one frame of its sample, or a few side by side."""

    def __init__(self, labels: GridLabels, width: int, height: int, frames: int) -> None:
        self._layout = plan_grid(len(labels.prompts), len(labels.seeds), width, height, frames, IMAGE_BOUNDS)
        self._sheet = _draw_sheet(self._layout, labels)

    def paste(self, prompt: int, seed: int, frames: Sequence[Frame]) -> None:
        image = _fit_to_cell(join_frames(frames), self._layout)
        self._sheet.paste(image, self._layout.corner(prompt, seed))

    def image(self) -> Image:
        return self._sheet


class VideoGrid:
    """The grid as a video, in which all clips play together. A clip that ends earlier shows its last frame."""

    def __init__(self, labels: GridLabels, width: int, height: int) -> None:
        self._layout = plan_grid(len(labels.prompts), len(labels.seeds), width, height, 1, VIDEO_BOUNDS)
        self._sheet = _draw_sheet(self._layout, labels)
        self._clips: dict[tuple[int, int], list[Image]] = {}

    def add_clip(self, prompt: int, seed: int, clip: Sequence[Frame]) -> None:
        self._clips[prompt, seed] = [_fit_to_cell(frame, self._layout) for frame in clip]

    def frames(self) -> Iterator[Frame]:
        for number in range(max(map(len, self._clips.values()))):
            for cell, clip in self._clips.items():
                self._sheet.paste(clip[min(number, len(clip) - 1)], self._layout.corner(*cell))
            yield np.array(self._sheet)


def join_frames(frames: Sequence[Frame]) -> Frame:
    """Frames side by side, unscaled."""
    gap = np.full((frames[0].shape[0], FRAME_GAP, 3), 255, np.uint8)
    parts = [part for frame in frames for part in (frame, gap)][:-1]
    return np.concatenate(parts, axis=1)


def _draw_sheet(layout: GridLayout, labels: GridLabels) -> Image:
    """The sheet with all labels, without samples."""
    sheet, pen = drawing.new_sheet(*layout.size)
    for top, text, size, colour in ((14, labels.title, 20, drawing.INK), (42, labels.note, 13, drawing.MUTED)):
        line = drawing.shorten_line(drawing.drawable_text(text), layout.size[0] - 2 * MARGIN, size)
        pen.text((MARGIN, top), line, colour, drawing.load_font(size))
    for column, seed in enumerate(labels.seeds):
        left, _ = layout.corner(0, column)
        pen.text((left, TITLE_HEIGHT + 4), _seed_label(seed, layout.cell_width), drawing.MUTED, drawing.load_font(13))
    for row, prompt in enumerate(labels.prompts):
        _, top = layout.corner(row, 0)
        lines, colour = ["(empty prompt)"], drawing.MUTED
        if prompt.strip():
            lines, colour = drawing.wrap_text(prompt, LABEL_WIDTH - 16, layout.row_height // LINE_HEIGHT), drawing.INK
        for number, line in enumerate(lines):
            pen.text((MARGIN, top + number * LINE_HEIGHT), line, colour, drawing.load_font(13))
    return sheet


def _seed_label(seed: int, width: int) -> str:
    """`seed 42`, shortened to the width of the column."""
    long = f"seed {seed}"
    return long if drawing.text_width(long, 13) <= width else drawing.shorten_line(str(seed), width, 13)


def _fit_to_cell(frame: Frame, layout: GridLayout) -> Image:
    """The frame scaled to its cell."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(frame))
    factor = min(layout.cell_width / image.width, layout.cell_height / image.height)
    size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
    return image.resize(size, Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.LANCZOS)
