"""Draws one flat shape on a flat background, for sample data and the quickstart."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

RgbColour: TypeAlias = tuple[int, int, int]

SHAPE_NAMES = ("circle", "square", "triangle", "star")


def draw_shape(
    size: tuple[int, int],
    shape: str,
    fill: RgbColour,
    background: RgbColour,
    centre: tuple[float, float],
    radius: float,
    supersampling: int,
) -> Image:
    """The picture, `size` pixels large. Centre and radius are shares of the sides and of the shorter side. It is drawn
    `supersampling` times larger and reduced, which smooths the edges."""
    from PIL import Image, ImageDraw

    width, height = size[0] * supersampling, size[1] * supersampling
    picture = Image.new("RGB", (width, height), background)
    pen = ImageDraw.Draw(picture)
    x, y, r = centre[0] * width, centre[1] * height, radius * min(width, height)
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    else:
        pen.polygon([(x + r * a, y - r * b) for a, b in _corners(shape)], fill=fill)
    return picture.resize(size, Image.Resampling.BOX)


def _corners(shape: str) -> list[tuple[float, float]]:
    """Corners on the unit circle (every second corner of a star is closer to the centre), upright, y upwards."""
    count, turn = {"square": (4, np.pi / 4), "triangle": (3, np.pi / 2), "star": (10, np.pi / 2)}[shape]
    angles = turn + 2 * np.pi * np.arange(count) / count
    distances = np.where((np.arange(count) % 2 == 1) & (shape == "star"), 0.45, 1.0)
    return [(float(a), float(b)) for a, b in zip(distances * np.cos(angles), distances * np.sin(angles), strict=True)]
