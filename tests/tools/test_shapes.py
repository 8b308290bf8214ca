"""The quickstart's pictures, and the classifier that looks at samples."""

import json
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image, ImageFilter

from supertuner.tools import shapes
from tests.tools.shape_classifier import RecognizedShape, classify

NOTHING = RecognizedShape(None, None)


def test_one_seed_gives_one_set_of_files_and_another_seed_another(tmp_path: Path) -> None:
    for name, seed in (("first", 3), ("again", 3), ("other", 4)):
        shapes.write_shapes(tmp_path / name, per_pair=1, held_out_per_pair=1, seed=seed)
    first, again, other = (_files(tmp_path / name) for name in ("first", "again", "other"))
    assert first == again
    assert first.keys() == other.keys()
    assert first != other


def test_captions_beside_the_pictures_say_what_is_in_them(tmp_path: Path) -> None:
    made = shapes.write_shapes(tmp_path, per_pair=2, held_out_per_pair=3)
    truth = json.loads(made.truth.read_text())
    pictures = sorted(tmp_path.rglob("*.png"))
    assert len(pictures) == len(truth) == made.train_pictures + made.held_out_pictures == 18 * 2 + 6 * 3
    for path in pictures:
        known = truth[path.relative_to(tmp_path).as_posix()]
        assert path.with_suffix(".txt").read_text() == shapes.caption(known["colour"], known["shape"]) + "\n"
        assert classify(_read(path)).pair == (known["colour"], known["shape"])


def test_held_out_pairs_are_in_no_training_picture_but_each_of_their_words_is(tmp_path: Path) -> None:
    made = shapes.write_shapes(tmp_path, per_pair=1, held_out_per_pair=1)
    seen = {path.read_text() for path in made.train.glob("*.txt")}
    unseen = {path.read_text() for path in made.held_out.glob("*.txt")}
    assert len(unseen) == len(shapes.HELD_OUT_PAIRS) == 6
    assert not seen & unseen
    assert {word for text in unseen for word in text.split()} <= {word for text in seen for word in text.split()}


def test_the_base_has_never_seen_a_colour_that_the_quickstart_teaches() -> None:
    assert not shapes.CHALKS.keys() & shapes.INKS.keys()
    assert {colour for colour, _ in shapes.chalk_pairs()} == shapes.CHALKS.keys()
    assert {colour for colour, _ in shapes.train_pairs()} == shapes.INKS.keys()


@pytest.mark.parametrize("side", [48, 64, 96])
def test_the_classifier_is_right_about_every_colour_and_shape_on_both_grounds(side: int) -> None:
    known = (*shapes.train_pairs(), *shapes.HELD_OUT_PAIRS, *shapes.chalk_pairs())
    seen_in_the_dark = [pair for pair in known if pair[0] != "black"]
    drawn = [
        *shapes.random_drawings(known, 5, Random(1)),
        *shapes.random_drawings(seen_in_the_dark, 5, Random(2), ground=(34, 38, 46)),
    ]
    wrong = [
        one for one in drawn if classify(np.asarray(shapes.render_drawing(one, side))).pair != (one.colour, one.shape)
    ]
    assert len(wrong) <= 0.01 * len(drawn), wrong


def test_a_blurred_and_slightly_noisy_picture_is_still_recognised() -> None:
    chance = np.random.default_rng(0)
    right = 0
    drawn = shapes.random_drawings((*shapes.train_pairs(), *shapes.HELD_OUT_PAIRS), 4, Random(3))
    for one in drawn:
        soft = np.asarray(shapes.render_drawing(one).filter(ImageFilter.GaussianBlur(0.8)), np.float64)
        noisy = np.clip(soft + chance.normal(0, 8, soft.shape), 0, 255).astype(np.uint8)
        right += classify(noisy).pair == (one.colour, one.shape)
    assert right >= 0.95 * len(drawn)


def test_noise_smears_and_empty_pictures_are_nothing() -> None:
    chance = np.random.default_rng(0)
    size = (shapes.SIDE_PIXELS, shapes.SIDE_PIXELS, 3)
    for _ in range(50):
        assert classify(chance.integers(0, 256, size, dtype=np.uint8)) == NOTHING
    assert classify(np.full(size, 240, np.uint8)) == NOTHING
    across = np.linspace(0, 255, shapes.SIDE_PIXELS).astype(np.uint8)
    assert classify(np.ascontiguousarray(np.broadcast_to(across[None, :, None], size))).pair is None
    blobs = chance.normal(128, 90, (6, 6, 3)).clip(0, 255).astype(np.uint8)
    smear = np.asarray(Image.fromarray(blobs).resize(size[:2], Image.Resampling.BICUBIC))
    assert classify(smear).pair is None


def test_a_shape_that_is_none_of_the_four_has_no_name() -> None:
    picture = np.full((shapes.SIDE_PIXELS, shapes.SIDE_PIXELS, 3), shapes.PAPER, np.uint8)
    picture[20:27, 6:42] = shapes.INKS["red"]
    assert classify(picture) == RecognizedShape("red", None)


def test_a_colour_that_is_none_of_those_known_has_no_name() -> None:
    one = shapes.ShapeDrawing("red", "square", shapes.PAPER, (0.5, 0.5), 0.3)
    picture = np.asarray(shapes.render_drawing(one)).copy()
    picture[(picture == shapes.INKS["red"]).all(axis=2)] = (255, 0, 255)
    assert classify(picture) == RecognizedShape(None, "square")


def test_the_classifier_has_no_favourite_when_it_cannot_know() -> None:
    """A classifier that answers one thing when in doubt would count noise as success for that one."""
    chance = np.random.default_rng(1)
    said = Counter(
        classify(np.clip(chance.normal(200, 40, (48, 48, 3)), 0, 255).astype(np.uint8)).pair for _ in range(100)
    )
    assert said == {None: 100}


def _files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _read(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    with Image.open(path) as picture:
        return np.asarray(picture)
