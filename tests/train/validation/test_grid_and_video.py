"""Grids as images and videos: every sample in its cell, for one and for thousands, and the same bytes each time."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from supertuner.data.decode.video import decode_video
from supertuner.sinks.drawing import drawable_text, load_font, png_bytes, wrap_text
from supertuner.train.validation.grid import (
    IMAGE_BOUNDS,
    MARGIN,
    VIDEO_BOUNDS,
    GridLabels,
    ImageGrid,
    SheetBounds,
    VideoGrid,
    join_frames,
    plan_grid,
)
from supertuner.train.validation.video import first_middle_last, mp4_bytes, select_encoder


def flat(colour: tuple[int, int, int], height: int = 32, width: int = 48) -> NDArray[np.uint8]:
    return np.full((height, width, 3), colour, np.uint8)


RED, GREEN = (220, 20, 30), (10, 200, 40)


def test_each_sample_is_in_the_row_of_its_prompt_and_the_column_of_its_seed() -> None:
    labels = GridLabels("run, step 1", "note", ["a", "b"], [0, 1])
    grid = ImageGrid(labels, 48, 32, 1)
    layout = plan_grid(2, 2, 48, 32, 1, IMAGE_BOUNDS)
    colours = {(0, 0): RED, (0, 1): GREEN, (1, 0): (0, 0, 255), (1, 1): (255, 255, 0)}
    for place, colour in colours.items():
        grid.paste(*place, [flat(colour)])
    sheet = np.asarray(grid.image())
    assert sheet.shape == (layout.size[1], layout.size[0], 3)
    for place, colour in colours.items():
        left, top = layout.corner(*place)
        cell = sheet[top : top + layout.cell_height, left : left + layout.cell_width]
        assert (cell == colour).all()


@given(
    st.integers(1, 256), st.integers(1, 64), st.integers(16, 2048), st.integers(16, 2048), st.sampled_from([1, 2, 3]),
    st.sampled_from([IMAGE_BOUNDS, VIDEO_BOUNDS]),
)  # fmt: skip
def test_no_grid_is_too_large_to_be_opened_and_no_cell_is_lost(
    prompts: int, seeds: int, width: int, height: int, frames: int, bounds: SheetBounds
) -> None:
    layout = plan_grid(prompts, seeds, width, height, frames, bounds)
    right, bottom = layout.corner(prompts - 1, seeds - 1)
    assert right + layout.cell_width + MARGIN <= layout.size[0] and bottom + layout.cell_height <= layout.size[1]
    assert layout.size[0] <= max(bounds.width + 2, 24 * 2 + 240 + seeds * 16 + 2)
    assert layout.size[0] % 2 == 0 and layout.size[1] % 2 == 0


def test_small_samples_are_enlarged_by_whole_factors_and_large_ones_scaled_down() -> None:
    small = plan_grid(1, 1, 32, 32, 1, IMAGE_BOUNDS)
    assert (small.cell_width, small.cell_height) == (256, 256)
    large = plan_grid(2, 4, 1280, 720, 1, IMAGE_BOUNDS)
    assert large.size[0] <= IMAGE_BOUNDS.width and large.cell_width / large.cell_height == pytest.approx(
        16 / 9, rel=0.01
    )


def test_the_video_plays_all_clips_together_until_the_longest_ends() -> None:
    labels = GridLabels("run", "note", ["a"], [0, 1])
    film = VideoGrid(labels, 48, 32)
    film.add_clip(0, 0, [flat(RED)])
    film.add_clip(0, 1, [flat(RED), flat(GREEN), flat(GREEN)])
    frames = list(film.frames())
    layout = plan_grid(1, 2, 48, 32, 1, VIDEO_BOUNDS)
    left, right = (layout.corner(0, seed) for seed in (0, 1))
    assert [tuple(frame[left[1], left[0]]) for frame in frames] == [RED, RED, RED]
    assert [tuple(frame[right[1], right[0]]) for frame in frames] == [RED, GREEN, GREEN]


def test_a_clip_is_represented_by_its_first_middle_and_last_frame() -> None:
    clip = np.arange(9, dtype=np.uint8).reshape(9, 1, 1, 1).repeat(3, axis=3)
    for length, shown in ((9, [0, 4, 8]), (2, [0, 1]), (1, [0])):
        assert [int(frame.max()) for frame in first_middle_last(clip[:length])] == shown
    assert join_frames([flat(RED), flat(GREEN)]).shape == (32, 48 + 2 + 48, 3)


def moving(frames: int, height: int, width: int) -> NDArray[np.uint8]:
    clip = np.empty((frames, height, width, 3), np.uint8)
    clip[:] = (200, 40, 30)
    for number in range(frames):
        clip[number, height // 4 : height // 2, number : number + width // 3] = (20, 220, 90)
    return clip


@pytest.mark.parametrize(("height", "width"), [(48, 64), (33, 63), (1, 1)])
def test_a_video_is_h264_with_every_frame_in_its_colours_at_its_rate(height: int, width: int) -> None:
    clip = moving(9, height, width)
    film = mp4_bytes(iter(clip), 16.0)
    with av.open(io.BytesIO(film)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.average_rate, stream.frames) == ("h264", 16, 9)
        assert (stream.width % 2, stream.height % 2) == (0, 0)
    seen = np.stack(list(decode_video(memoryview(film), 0, 9, None)))[:, :height, :width]
    assert np.abs(seen.astype(int) - clip)[:, -4:].mean() < 4


def test_equal_frames_give_equal_bytes() -> None:
    clip = moving(9, 48, 64)
    assert mp4_bytes(iter(clip), 23.976) == mp4_bytes(iter(clip), 23.976)
    assert b"creation_time" not in mp4_bytes(iter(clip), 16) and select_encoder() == "libx264"


# ── text ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.text(st.characters(codec=None)), st.integers(1, 300), st.integers(1, 5))
def test_any_text_can_be_drawn_and_fits(text: str, width: int, most: int) -> None:
    lines = wrap_text(text, width, most)
    assert 1 <= len(lines) <= most
    assert all(load_font(13).getlength(line) <= max(width, load_font(13).getlength("…")) for line in lines)
    grid = ImageGrid(GridLabels(text, text, [text], [2**62]), 16, 16, 1)
    grid.paste(0, 0, [flat(RED, 16, 16)])
    assert png_bytes(grid.image()) == png_bytes(grid.image())


def test_accents_are_dropped_and_letters_without_a_shape_are_boxes() -> None:
    assert drawable_text("Déjà vu — 3×4, naïve ﬁne\n“quote”") == "Deja vu - 3 x 4, naive fine “quote”"
    assert drawable_text("漢字") == "□□" and drawable_text("e\u0301") == "e" and drawable_text("a\u200bb") == "ab"


def test_the_font_has_the_characters_that_are_kept() -> None:
    from supertuner.sinks.drawing import FONT_CHARACTERS

    box = bytes(load_font(40).getmask("漢"))
    assert all(bytes(load_font(40).getmask(sign)) != box for sign in FONT_CHARACTERS)
    assert all(bytes(load_font(40).getmask(chr(code))) != box for code in range(33, 127))


@pytest.mark.parametrize("seed", [0, 2])
def test_a_video_of_small_frames_does_not_depend_on_uninitialised_memory(seed: int) -> None:
    """x264's lookahead reads over the edge of images that are smaller than its blocks, unless it is switched off: of
    these frames, chosen for that, one video in twenty differed."""
    chance = np.random.default_rng(seed)
    chance.normal(size=5 * 32 * 32 * 3)
    colours = ((118, 138, 132), (110, 170, 150), (120, 180, 150), (160, 170, 120), (180, 150, 130))
    blocks = [np.array(colour) + chance.normal(0, 15, (16, 16, 3)) for colour in colours]
    frames = np.clip(np.stack(blocks).repeat(2, 1).repeat(2, 2), 0, 255).astype(np.uint8)
    before: list[bytes] = []
    made = set()
    for _ in range(200):
        before += [np.random.bytes(np.random.randint(1, 60_000)) for _ in range(20)]
        del before[::2]
        made.add(mp4_bytes(iter(frames), 16.0))
    assert len(made) == 1
