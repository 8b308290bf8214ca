"""The quickstart's pictures, and the classifier that the tests use on samples."""

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


def test_equal_seeds_give_equal_files_and_other_seeds_other_files(tmp_path: Path) -> None:
    for name, seed in (("first", 3), ("again", 3), ("other", 4)):
        shapes.write_shapes(tmp_path / name, per_pair=1, held_out_per_pair=1, seed=seed)
    first, again, other = (_files(tmp_path / name) for name in ("first", "again", "other"))
    assert first == again
    assert first.keys() == other.keys()
    assert first != other


def test_captions_match_the_pictures(tmp_path: Path) -> None:
    shapes.write_shapes(tmp_path, per_pair=2, held_out_per_pair=3)
    truth = json.loads((tmp_path / shapes.TRUTH_FILE).read_text())
    pictures = sorted(tmp_path.rglob("*.png"))
    assert len(pictures) == len(truth) == 18 * 2 + 6 * 3
    for path in pictures:
        known = truth[path.relative_to(tmp_path).as_posix()]
        assert path.with_suffix(".txt").read_text() == shapes.caption(known["colour"], known["shape"]) + "\n"
        assert classify(_read(path)).pair == (known["colour"], known["shape"])


def test_no_training_picture_has_a_held_out_pair_but_all_their_words_occur(tmp_path: Path) -> None:
    shapes.write_shapes(tmp_path, per_pair=1, held_out_per_pair=1)
    seen = {path.read_text() for path in (tmp_path / "train").glob("*.txt")}
    unseen = {path.read_text() for path in (tmp_path / "held_out").glob("*.txt")}
    assert len(unseen) == len(shapes.HELD_OUT_PAIRS) == 6
    assert not seen & unseen
    assert {word for text in unseen for word in text.split()} <= {word for text in seen for word in text.split()}


def test_the_base_was_not_trained_on_the_colours_of_the_quickstart() -> None:
    assert not shapes.CHALKS.keys() & shapes.INKS.keys()
    assert {colour for colour, _ in shapes.chalk_pairs()} == shapes.CHALKS.keys()
    assert {colour for colour, _ in shapes.train_pairs()} == shapes.INKS.keys()


@pytest.mark.parametrize("side", [48, 64, 96])
def test_the_classifier_recognises_every_colour_and_shape_on_both_backgrounds(side: int) -> None:
    known = (*shapes.train_pairs(), *shapes.HELD_OUT_PAIRS, *shapes.chalk_pairs())
    visible_on_dark = [pair for pair in known if pair[0] != "black"]
    drawn = [
        *shapes.random_drawings(known, 5, Random(1)),
        *shapes.random_drawings(visible_on_dark, 5, Random(2), ground=(34, 38, 46)),
    ]
    wrong = [
        one for one in drawn if classify(np.asarray(shapes.render_drawing(one, side))).pair != (one.colour, one.shape)
    ]
    assert len(wrong) <= 0.01 * len(drawn), wrong


def test_a_blurred_and_slightly_noisy_picture_is_still_recognised() -> None:
    rng = np.random.default_rng(0)
    right = 0
    drawn = shapes.random_drawings((*shapes.train_pairs(), *shapes.HELD_OUT_PAIRS), 4, Random(3))
    for one in drawn:
        soft = np.asarray(shapes.render_drawing(one).filter(ImageFilter.GaussianBlur(0.8)), np.float64)
        noisy = np.clip(soft + rng.normal(0, 8, soft.shape), 0, 255).astype(np.uint8)
        right += classify(noisy).pair == (one.colour, one.shape)
    assert right >= 0.95 * len(drawn)


def test_noise_gradients_and_empty_pictures_are_not_recognised() -> None:
    rng = np.random.default_rng(0)
    size = (shapes.SIDE_PIXELS, shapes.SIDE_PIXELS, 3)
    for _ in range(50):
        assert classify(rng.integers(0, 256, size, dtype=np.uint8)) == NOTHING
    assert classify(np.full(size, 240, np.uint8)) == NOTHING
    across = np.linspace(0, 255, shapes.SIDE_PIXELS).astype(np.uint8)
    assert classify(np.ascontiguousarray(np.broadcast_to(across[None, :, None], size))).pair is None
    blobs = rng.normal(128, 90, (6, 6, 3)).clip(0, 255).astype(np.uint8)
    smear = np.asarray(Image.fromarray(blobs).resize(size[:2], Image.Resampling.BICUBIC))
    assert classify(smear).pair is None


def test_another_shape_is_not_recognised() -> None:
    picture = np.full((shapes.SIDE_PIXELS, shapes.SIDE_PIXELS, 3), shapes.PAPER, np.uint8)
    picture[20:27, 6:42] = shapes.INKS["red"]
    assert classify(picture) == RecognizedShape("red", None)


def test_another_colour_is_not_recognised() -> None:
    one = shapes.ShapeDrawing("red", "square", shapes.PAPER, (0.5, 0.5), 0.3)
    picture = np.asarray(shapes.render_drawing(one)).copy()
    picture[(picture == shapes.INKS["red"]).all(axis=2)] = (255, 0, 255)
    assert classify(picture) == RecognizedShape(None, "square")


def test_the_classifier_does_not_guess() -> None:
    """A classifier that guesses would count noise as a success for its favourite answer."""
    rng = np.random.default_rng(1)
    answers = Counter(
        classify(np.clip(rng.normal(200, 40, (48, 48, 3)), 0, 255).astype(np.uint8)).pair for _ in range(100)
    )
    assert answers == {None: 100}


def _files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _read(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    with Image.open(path) as picture:
        return np.asarray(picture)
