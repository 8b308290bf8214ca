"""Recognises the colour and the shape in a picture by measurement, without learning; None if it is not certain.

The background is the median colour of the picture's border. The mask of the figure is the distance of each pixel from
the background, relative to that of the figure. The colour is the nearest known one; the shape is the template with the
best overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from supertuner.tools.shapes import COLOURS, PAPER, SHAPES, ShapeDrawing, render_drawing

Pixels = NDArray[np.uint8]
Mask = NDArray[np.float64]
"""The share of each pixel that belongs to the figure, from 0 to 1."""

UNEVEN_GROUND = 12.0
"""Largest median distance of the border from its median colour, in Lab units."""
LEAST_CONTRAST = 18.0
"""Smallest distance between background and figure, in Lab units."""
FAR_COLOUR = 24.0
"""Largest distance of a colour from a known one, in Lab units."""
LEAST_OVERLAP = 0.80
"""Smallest intersection over union of mask and template."""
LEAST_LEAD = 0.03
"""Smallest difference between the overlaps of the best and the second best template."""
_GRID = 48


@dataclass(frozen=True, slots=True)
class RecognizedShape:
    colour: str | None
    shape: str | None

    @property
    def pair(self) -> tuple[str, str] | None:
        return None if self.colour is None or self.shape is None else (self.colour, self.shape)


def classify(picture: Pixels) -> RecognizedShape:
    """The content of an RGB picture, HWC."""
    found = _figure(picture)
    if found is None:
        return RecognizedShape(None, None)
    mask, lab = found
    return RecognizedShape(_colour(mask, lab), _shape(mask))


def _figure(picture: Pixels) -> tuple[Mask, NDArray[np.float64]] | None:
    """(the mask, the picture in Lab); None without an even background or without a figure on it."""
    lab = _lab(picture)
    border = np.concatenate(
        [lab[:2].reshape(-1, 3), lab[-2:].reshape(-1, 3), lab[:, :2].reshape(-1, 3), lab[:, -2:].reshape(-1, 3)]
    )
    ground = np.median(border, axis=0)
    if np.median(np.linalg.norm(border - ground, axis=1)) > UNEVEN_GROUND:
        return None
    away = np.linalg.norm(lab - ground, axis=2)
    reach = float(np.quantile(away, 0.93))  # the smallest star covers 9 % of the picture
    if reach < LEAST_CONTRAST:
        return None
    return np.clip(away / reach, 0, 1), lab


def _colour(mask: Mask, lab: NDArray[np.float64]) -> str | None:
    inside = lab[mask > 0.8]
    if len(inside) == 0:
        return None
    seen = np.median(inside, axis=0)
    away = {name: float(np.linalg.norm(seen - known)) for name, known in _known_colours().items()}
    nearest = min(away, key=lambda name: away[name])
    return nearest if away[nearest] <= FAR_COLOUR else None


def _shape(mask: Mask) -> str | None:
    placed = _placed(mask)
    if placed is None:
        return None
    overlap = {
        name: float(np.minimum(placed, t).sum() / np.maximum(placed, t).sum()) for name, t in _templates().items()
    }
    best, second = sorted(overlap, key=lambda name: -overlap[name])[:2]
    sure = overlap[best] >= LEAST_OVERLAP and overlap[best] - overlap[second] >= LEAST_LEAD
    return best if sure else None


def _placed(mask: Mask) -> Mask | None:
    """The mask centred by its centre of mass and scaled to cover a fifth of the grid; None if it is too small or too
    large."""
    solid = np.clip((mask - 0.25) / 0.5, 0, 1)
    area = solid.sum()
    if not 0.03 * solid.size <= area <= 0.7 * solid.size:
        return None
    rows, columns = np.indices(solid.shape)
    y, x = (solid * rows).sum() / area, (solid * columns).sum() / area
    step = np.sqrt(area / 0.2) / _GRID
    offsets = (np.arange(_GRID) - (_GRID - 1) / 2) * step
    return _bilinear(solid, y + offsets, x + offsets)


def _bilinear(mask: Mask, rows: NDArray[np.float64], columns: NDArray[np.float64]) -> Mask:
    """The mask at these rows and columns; 0 outside."""
    inside = np.outer((rows > -0.5) & (rows < mask.shape[0] - 0.5), (columns > -0.5) & (columns < mask.shape[1] - 0.5))
    rows, columns = np.clip(rows, 0, mask.shape[0] - 1.001), np.clip(columns, 0, mask.shape[1] - 1.001)
    top, left = rows.astype(int), columns.astype(int)
    down, right = (rows - top)[:, None], (columns - left)[None, :]
    upper = mask[np.ix_(top, left)] * (1 - right) + mask[np.ix_(top, left + 1)] * right
    lower = mask[np.ix_(top + 1, left)] * (1 - right) + mask[np.ix_(top + 1, left + 1)] * right
    placed: Mask = (upper * (1 - down) + lower * down) * inside
    return placed


@lru_cache
def _templates() -> dict[str, Mask]:
    templates = {}
    for name in SHAPES:
        found = _figure(np.asarray(render_drawing(ShapeDrawing("blue", name, PAPER, (0.5, 0.5), 0.3))))
        assert found is not None
        placed = _placed(found[0])
        assert placed is not None
        templates[name] = placed
    return templates


@lru_cache
def _known_colours() -> dict[str, NDArray[np.float64]]:
    return {name: _lab(np.array([[rgb]], np.uint8))[0, 0] for name, rgb in COLOURS.items()}


def _lab(picture: Pixels) -> NDArray[np.float64]:
    """sRGB → CIE L*a*b* (D65), in which distances match perceived differences."""
    s = picture.astype(np.float64) / 255
    linear = np.where(s <= 0.04045, s / 12.92, ((s + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = linear @ to_xyz.T / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    lab: NDArray[np.float64] = np.stack(
        [116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], axis=-1
    )
    return lab
