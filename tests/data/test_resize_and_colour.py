"""Crops have the bucket's aspect ratio, filters are antialiased, and the colour map applies each setting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from supertuner.data.batching.augment import AugmentationParams, apply_colour_map, colour_map
from supertuner.data.decode.resize import crop_and_resize, crop_box

SIDE = st.integers(1, 5000)
SHARE = st.floats(0, 1)


@given(SIDE, SIDE, st.integers(16, 2048), st.integers(16, 2048), SHARE, SHARE)
def test_a_crop_is_the_largest_part_with_the_bucket_s_aspect_ratio(width, height, to_width, to_height, crop_x, crop_y):
    box = crop_box(width, height, to_width, to_height, crop_x, crop_y)
    assert 0 <= box.left <= box.left + box.width <= width and box.width >= 1
    assert 0 <= box.top <= box.top + box.height <= height and box.height >= 1
    assert box.width == width or box.height == height
    assert abs(box.width * to_height - box.height * to_width) <= max(to_width, to_height) / 2 + 1 or 1 in (
        box.width,
        box.height,
    )


def test_a_crop_moves_from_edge_to_edge():
    lefts = [crop_box(300, 100, 64, 64, crop_x, 0.5).left for crop_x in (0.0, 0.5, 1.0)]
    assert lefts == [0, 100, 200]


@pytest.mark.parametrize("resize_filter", ["lanczos", "bicubic", "bilinear", "area"])
@pytest.mark.parametrize("size", [(90, 70), (400, 300)])
def test_resizing_agrees_with_pillow_s_antialiased_filters(resize_filter, size):
    rng = np.random.default_rng(0)
    image = np.array(Image.fromarray(rng.integers(0, 255, (30, 40, 3), dtype=np.uint8)).resize((240, 180)))
    resized = crop_and_resize(image, crop_box(240, 180, *size, 0.3, 0.6), *size, resize_filter)
    box = crop_box(240, 180, *size, 0.3, 0.6)
    filters = {"area": Image.Resampling.BOX} | {f.name.lower(): f for f in Image.Resampling}
    part = Image.fromarray(image).crop((box.left, box.top, box.left + box.width, box.top + box.height))
    expected = np.asarray(part.resize(size, filters[resize_filter])).astype(int)
    assert resized.shape == (3, size[1], size[0]) and resized.dtype == torch.uint8
    assert np.abs(resized.permute(1, 2, 0).numpy() - expected).max() <= 3


def test_an_image_of_the_right_size_is_not_changed():
    image = np.random.default_rng(1).integers(0, 255, (48, 64, 3), dtype=np.uint8)
    assert np.array_equal(
        crop_and_resize(image, crop_box(64, 48, 64, 48, 0, 0), 64, 48, "lanczos").permute(1, 2, 0), image
    )


def mapped_colour(rgb: tuple[int, int, int], **params: float) -> list[int]:
    pixels = torch.tensor(rgb, dtype=torch.uint8).reshape(3, 1, 1).repeat(1, 2, 2)
    colours = colour_map(AugmentationParams(**params))
    assert colours is not None
    apply_colour_map(pixels, colours)
    assert (pixels == pixels[:, :1, :1]).all()
    return pixels[:, 0, 0].tolist()


def test_the_effect_of_each_colour_setting():
    assert mapped_colour((100, 50, 200), brightness=0.5) == [50, 25, 100]
    assert mapped_colour((100, 50, 200), brightness=2.0) == [200, 100, 255]
    assert mapped_colour((100, 100, 100), contrast=0.0) == [128, 128, 128]
    assert mapped_colour((255, 0, 0), saturation=0.0) == [76, 76, 76]
    assert mapped_colour((90, 90, 90), saturation=1.7) == [90, 90, 90]
    assert mapped_colour((90, 90, 90), hue=0.3) == [90, 90, 90]


def test_a_third_of_a_hue_rotation_changes_the_dominant_primary_and_a_full_one_nothing():
    assert int(np.argmax(mapped_colour((200, 40, 40), hue=1 / 3))) != 0
    assert np.abs(np.array(mapped_colour((200, 40, 40), hue=1.0)) - (200, 40, 40)).max() <= 1


def test_the_identity_needs_no_colour_map():
    assert colour_map(AugmentationParams(flip=True, crop_x=0.1)) is None
