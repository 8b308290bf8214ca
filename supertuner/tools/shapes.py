"""Draws the quickstart's pictures, a shape of one colour each, with their captions and the truth about them.

The tiny base model was trained on CHALKS, a few dull colours. The quickstart teaches it INKS: bright colours, whose
names the base has never seen. Some pairs of ink and shape are in no training picture; whether they can be drawn
afterwards is what the quickstart measures.
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

from supertuner.tools.figure import FIGURES, Colour, draw_figure

if TYPE_CHECKING:
    from PIL.Image import Image

Pair: TypeAlias = tuple[str, str]
"""Name of a colour, name of a shape."""

SHAPES = FIGURES
CHALKS: dict[str, Colour] = {
    "black": (44, 46, 52),
    "grey": (150, 152, 156),
    "pink": (236, 160, 186),
    "brown": (122, 78, 48),
    "teal": (66, 158, 158),
    "olive": (132, 130, 66),
}
INKS: dict[str, Colour] = {
    "red": (214, 38, 44),
    "orange": (240, 128, 24),
    "yellow": (244, 208, 40),
    "green": (40, 158, 62),
    "blue": (36, 92, 214),
    "purple": (136, 56, 172),
}
COLOURS: dict[str, Colour] = {**CHALKS, **INKS}
PAPER: Colour = (246, 243, 236)
HELD_OUT: tuple[Pair, ...] = (
    ("red", "star"),
    ("orange", "circle"),
    ("yellow", "square"),
    ("green", "triangle"),
    ("blue", "circle"),
    ("purple", "square"),
)
"""Every colour once and every shape: all of them are known from other pairs."""
SIDE = 48
"""Pixels of a picture's side."""
BASE = Path(__file__).resolve().parent.parent / "assets" / "tiny-wan22"
"""The tiny base model, which comes with the package; scripts/pretrain_tiny.py made it."""
TRUTH_FILE = "truth.json"
_FINER = 4
"""Pictures are drawn so much larger and reduced."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """What is in a picture. Centre and radius are shares of its side."""

    colour: str
    shape: str
    ground: Colour
    centre: tuple[float, float]
    radius: float

    @property
    def caption(self) -> str:
        return caption(self.colour, self.shape)


@dataclass(frozen=True, slots=True)
class ShapesData:
    """Two folders of pictures with captions beside them, and a file that says what is in each."""

    train: Path
    held_out: Path
    truth: Path
    train_pictures: int
    held_out_pictures: int


def caption(*words: str) -> str:
    """Of a colour and a shape: "an orange star"."""
    return f"{'an' if words[0][0] in 'aeiou' else 'a'} {' '.join(words)}"


def chalk_pairs() -> tuple[Pair, ...]:
    """What the base model was trained on."""
    return tuple(product(CHALKS, SHAPES))


def train_pairs() -> tuple[Pair, ...]:
    """What the quickstart trains on: every pair of ink and shape that is not held out."""
    return tuple(pair for pair in product(INKS, SHAPES) if pair not in HELD_OUT)


def drawings(pairs: Iterable[Pair], each: int, random: Random, ground: Colour = PAPER) -> list[Drawing]:
    """`each` drawings of every pair, at places and in sizes that vary."""
    return [
        Drawing(
            colour,
            shape,
            ground,
            (round(random.uniform(0.42, 0.58), 4), round(random.uniform(0.42, 0.58), 4)),
            round(random.uniform(0.25, 0.35), 4),
        )
        for colour, shape in pairs
        for _ in range(each)
    ]


def draw(drawing: Drawing, side: int = SIDE) -> Image:
    """The picture, `side` pixels wide and high."""
    fill = COLOURS[drawing.colour]
    return draw_figure((side, side), drawing.shape, fill, drawing.ground, drawing.centre, drawing.radius, _FINER)


def draw_all(pictures: Sequence[Drawing], side: int = SIDE) -> NDArray[np.uint8]:
    """The pictures in one block: NHWC."""
    return np.stack([np.asarray(draw(one, side)) for one in pictures])


def write_shapes(
    folder: Path, *, each: int = 16, held_out_each: int = 8, seed: int = 0, side: int = SIDE
) -> ShapesData:
    """Write the quickstart's two folders and the truth below `folder`. One seed, one set of files."""
    random = Random(seed)
    made = {
        "train": drawings(train_pairs(), each, random),
        "held_out": drawings(HELD_OUT, held_out_each, random),
    }
    truth: dict[str, dict[str, object]] = {}
    for part, pictures in made.items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        for number, one in enumerate(pictures):
            name = f"{part}/{number:03d}-{one.colour}-{one.shape}"
            draw(one, side).save(folder / f"{name}.png")
            (folder / f"{name}.txt").write_text(one.caption + "\n")
            truth[f"{name}.png"] = asdict(one)
    (folder / TRUTH_FILE).write_text(json.dumps(truth, indent=1) + "\n")
    return ShapesData(
        folder / "train", folder / "held_out", folder / TRUTH_FILE, len(made["train"]), len(made["held_out"])
    )
