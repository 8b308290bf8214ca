"""A grid of samples: a row for each prompt, a column for each seed, labelled; as a picture, and as frames of a film.

The layout is decided first, from counts and sizes alone; samples are put into it one by one, and only what is drawn of
them is kept. Small samples are enlarged pixel by pixel, so that they can be looked at; large ones are made smaller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from supertuner.sinks.drawing import INK, QUIET, drawable, font, sheet_of, shortened, text_width, wrapped

if TYPE_CHECKING:
    from PIL.Image import Image

Frame: TypeAlias = NDArray[np.uint8]
"""HWC."""

MARGIN, GAP, BETWEEN_FRAMES = 24, 8, 2
LABEL, LINE = 240, 18
TITLE, HEADS = 64, 26
WANTED_SIDE, WANTED_IN_STRIP = 256, 144
SMALLEST_SIDE = 8
LABEL_LINES = 3
"""Room for so many lines of a prompt, however small the samples."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest sheet that is drawn, if samples can be made small enough for it."""

    width: int
    height: int


PICTURE = Bounds(2400, 12_000)
FILM = Bounds(1920, 1200)


@dataclass(frozen=True, slots=True)
class Labels:
    title: str
    note: str
    prompts: Sequence[str]
    seeds: Sequence[int]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything on the sheet is."""

    prompts: int
    seeds: int
    cell_width: int
    cell_height: int

    @property
    def size(self) -> tuple[int, int]:
        width = MARGIN + LABEL + self.seeds * (self.cell_width + GAP) - GAP + MARGIN
        height = TITLE + HEADS + self.prompts * (self.row_height + GAP) - GAP + MARGIN
        return width + width % 2, height + height % 2  # even, as films want it

    @property
    def row_height(self) -> int:
        return max(self.cell_height, LINE * LABEL_LINES)

    def corner(self, prompt: int, seed: int) -> tuple[int, int]:
        left = MARGIN + LABEL + seed * (self.cell_width + GAP)
        return left, TITLE + HEADS + prompt * (self.row_height + GAP)


def lay_out(prompts: int, seeds: int, width: int, height: int, frames: int, bounds: Bounds) -> Layout:
    """A layout for cells of `frames` frames of this size side by side. Whole factors when they are enlarged."""
    strip = frames * (width + BETWEEN_FRAMES) - BETWEEN_FRAMES
    across = (bounds.width - 2 * MARGIN - LABEL + GAP) / seeds - GAP
    down = (bounds.height - TITLE - HEADS - MARGIN + GAP) / prompts - GAP
    wanted = (WANTED_SIDE if frames == 1 else WANTED_IN_STRIP) / max(width, height)
    factor = min(across / strip, down / height, max(1.0, wanted))
    if factor >= 1:
        factor = float(floor(factor))
    return Layout(prompts, seeds, *(max(SMALLEST_SIDE, floor(side * factor)) for side in (strip, height)))


class Grid:
    """The picture. A sample stands in its cell as one frame, or as a few side by side."""

    def __init__(self, labels: Labels, width: int, height: int, frames: int) -> None:
        self._layout = lay_out(len(labels.prompts), len(labels.seeds), width, height, frames, PICTURE)
        self._sheet = _empty(self._layout, labels)

    def put(self, prompt: int, seed: int, frames: Sequence[Frame]) -> None:
        picture = _fitted(strip(frames), self._layout)
        self._sheet.paste(picture, self._layout.corner(prompt, seed))

    def picture(self) -> Image:
        return self._sheet


class FilmGrid:
    """The film: the same sheet, in which all clips run together. A clip that ends earlier stands still."""

    def __init__(self, labels: Labels, width: int, height: int) -> None:
        self._layout = lay_out(len(labels.prompts), len(labels.seeds), width, height, 1, FILM)
        self._sheet = _empty(self._layout, labels)
        self._clips: dict[tuple[int, int], list[Image]] = {}

    def put(self, prompt: int, seed: int, clip: Sequence[Frame]) -> None:
        self._clips[prompt, seed] = [_fitted(frame, self._layout) for frame in clip]

    def frames(self) -> Iterator[Frame]:
        for number in range(max(map(len, self._clips.values()))):
            for place, clip in self._clips.items():
                self._sheet.paste(clip[min(number, len(clip) - 1)], self._layout.corner(*place))
            yield np.array(self._sheet)


def strip(frames: Sequence[Frame]) -> Frame:
    """Frames side by side, every pixel as it is."""
    between = np.full((frames[0].shape[0], BETWEEN_FRAMES, 3), 255, np.uint8)
    parts = [part for frame in frames for part in (frame, between)][:-1]
    return np.concatenate(parts, axis=1)


def _empty(layout: Layout, labels: Labels) -> Image:
    """The sheet with everything on it but the samples."""
    sheet, pen = sheet_of(*layout.size)
    room = layout.size[0] - 2 * MARGIN
    pen.text((MARGIN, 14), shortened(drawable(labels.title), room, 20), INK, font(20))
    pen.text((MARGIN, 42), shortened(drawable(labels.note), room, 13), QUIET, font(13))
    for column, seed in enumerate(labels.seeds):
        left, _ = layout.corner(0, column)
        pen.text((left, TITLE + 4), _head(seed, layout.cell_width), QUIET, font(13))
    for row, prompt in enumerate(labels.prompts):
        _, top = layout.corner(row, 0)
        said = bool(prompt.strip())
        words = wrapped(prompt, LABEL - 16, layout.row_height // LINE) if said else ["(empty prompt)"]
        for number, line in enumerate(words):
            pen.text((MARGIN, top + number * LINE), line, INK if said else QUIET, font(13))
    return sheet


def _head(seed: int, width: int) -> str:
    """`seed 42`, or as much of it as fits over the column."""
    long = f"seed {seed}"
    return long if text_width(long, 13) <= width else shortened(str(seed), width, 13)


def _fitted(frame: Frame, layout: Layout) -> Image:
    """The frame as large as its cell allows."""
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(frame))
    factor = min(layout.cell_width / picture.width, layout.cell_height / picture.height)
    size = max(1, round(picture.width * factor)), max(1, round(picture.height * factor))
    return picture.resize(size, Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.LANCZOS)
