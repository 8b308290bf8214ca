"""Draws the quickstart's pictures, one coloured shape each, with captions and a file of ground truth.

The tiny base model was trained on CHALKS, a few dull colours. The quickstart teaches it INKS: bright colours whose
names the base model does not know. Some pairs of ink and shape are in no training picture; the quickstart measures
whether the trained model can draw them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from supertuner.tools.shape_drawing import SHAPE_NAMES, RgbColour, draw_shape

if TYPE_CHECKING:
    from PIL.Image import Image

ColourShapePair: TypeAlias = tuple[str, str]
"""(name of a colour, name of a shape)."""

SHAPES = SHAPE_NAMES
CHALKS: dict[str, RgbColour] = {
    "black": (44, 46, 52),
    "grey": (150, 152, 156),
    "pink": (236, 160, 186),
    "brown": (122, 78, 48),
    "teal": (66, 158, 158),
    "olive": (132, 130, 66),
}
INKS: dict[str, RgbColour] = {
    "red": (214, 38, 44),
    "orange": (240, 128, 24),
    "yellow": (244, 208, 40),
    "green": (40, 158, 62),
    "blue": (36, 92, 214),
    "purple": (136, 56, 172),
}
COLOURS: dict[str, RgbColour] = {**CHALKS, **INKS}
PAPER: RgbColour = (246, 243, 236)
HELD_OUT_PAIRS: tuple[ColourShapePair, ...] = tuple(
    zip(INKS, ("star", "circle", "square", "triangle", "circle", "square"), strict=True)
)
"""Each ink once, and all shapes; every ink and every shape also occurs in training pairs."""
SIDE_PIXELS = 48
"""Width and height of a picture."""
BASE_MODEL = Path(__file__).resolve().parent.parent / "assets" / "tiny-wan22"
"""The tiny base model, which ships with the package; scripts/pretrain_tiny.py trains it."""
TRUTH_FILE = "truth.json"
_SUPERSAMPLING = 4
"""Pictures are drawn this many times larger and then reduced."""


@dataclass(frozen=True, slots=True)
class ShapeDrawing:
    """The content of a picture. Centre and radius are shares of its side."""

    colour: str
    shape: str
    ground: RgbColour
    centre: tuple[float, float]
    radius: float

    @property
    def caption(self) -> str:
        return caption(self.colour, self.shape)


def caption(*words: str) -> str:
    """The caption of a colour and a shape: "an orange star"."""
    return f"{'an' if words[0][0] in 'aeiou' else 'a'} {' '.join(words)}"


def chalk_pairs() -> tuple[ColourShapePair, ...]:
    """The pairs of colour and shape that the base model was trained on."""
    return tuple(product(CHALKS, SHAPES))


def train_pairs() -> tuple[ColourShapePair, ...]:
    """The pairs that the quickstart trains on: every pair of ink and shape that is not held out."""
    return tuple(pair for pair in product(INKS, SHAPES) if pair not in HELD_OUT_PAIRS)


def random_drawings(
    pairs: Iterable[ColourShapePair], per_pair: int, random: Random, ground: RgbColour = PAPER
) -> list[ShapeDrawing]:
    """`per_pair` drawings of every pair, at random places and in random sizes."""
    return [
        ShapeDrawing(
            colour,
            shape,
            ground,
            (round(random.uniform(0.42, 0.58), 4), round(random.uniform(0.42, 0.58), 4)),
            round(random.uniform(0.25, 0.35), 4),
        )
        for colour, shape in pairs
        for _ in range(per_pair)
    ]


def render_drawing(drawing: ShapeDrawing, side: int = SIDE_PIXELS) -> Image:
    fill = COLOURS[drawing.colour]
    return draw_shape((side, side), drawing.shape, fill, drawing.ground, drawing.centre, drawing.radius, _SUPERSAMPLING)


def render_drawings(drawings: Sequence[ShapeDrawing], side: int = SIDE_PIXELS) -> NDArray[np.uint8]:
    """The pictures as one array, NHWC."""
    return np.stack([np.asarray(render_drawing(drawing, side)) for drawing in drawings])


def write_shapes(
    folder: Path, *, per_pair: int = 16, held_out_per_pair: int = 8, seed: int = 0, side: int = SIDE_PIXELS
) -> None:
    """Write the quickstart's folders `train` and `held_out` and the file `truth.json` with the content of each picture.

    Equal seeds give equal files.
    """
    random = Random(seed)
    truth: dict[str, dict[str, object]] = {}
    for part, pairs, count in (("train", train_pairs(), per_pair), ("held_out", HELD_OUT_PAIRS, held_out_per_pair)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for number, drawing in enumerate(random_drawings(pairs, count, random)):
            name = f"{part}/{number:03d}-{drawing.colour}-{drawing.shape}"
            render_drawing(drawing, side).save(folder / f"{name}.png")
            (folder / f"{name}.txt").write_text(drawing.caption + "\n")
            truth[f"{name}.png"] = asdict(drawing)
    (folder / TRUTH_FILE).write_text(json.dumps(truth, indent=1) + "\n")
