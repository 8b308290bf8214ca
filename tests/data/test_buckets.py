"""Buckets: every sample has the nearest one per resolution, or a reason for having none."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supertuner.config.settings.data import AudioSettings, DatasetSettings
from supertuner.core.types import MediaKind
from supertuner.data.ordering.bucket_assignment import bucket_indices, bucket_table, no_bucket_reason
from supertuner.data.ordering.buckets import (
    NO_BUCKET,
    audio_steps,
    bucket_sizes,
    frame_bucket_indices,
    frames_available,
    nearest_size,
)
from supertuner.data.ordering.sample_collection import MediaMetadataSlice

SIDES = st.integers(1, 6000)
SHAPES = st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=30)


def images(shapes: list[tuple[int, int]], frames: int = 1, fps: float = 0, seconds: float = 0) -> MediaMetadataSlice:
    width, height = (np.array(side, np.int32) for side in zip(*shapes, strict=True))
    count = len(shapes)
    return MediaMetadataSlice(
        width,
        height,
        np.full(count, frames, np.int32),
        np.full(count, fps, np.float32),
        np.full(count, seconds, np.float32),
    )


@given(st.integers(64, 2048), st.sampled_from([8, 16, 32, 64]), st.floats(1, 6))
@settings(max_examples=150, deadline=None)
def test_sides_are_multiples_of_the_step_and_areas_are_close_to_the_resolution(resolution, step, ratio):
    table = bucket_sizes(resolution, step, ratio)
    square = math.floor(resolution / step + 0.5) * step
    assert (square, square) in table and len(set(table)) == len(table)
    assert {(h, w) for w, h in table} == set(table)
    for w, h in table:
        assert w % step == h % step == 0 and max(w, h) <= ratio * min(w, h)
        assert abs(w * h / resolution**2 - 1) <= min(0.2, 1.1 * step / min(w, h)) or w == h == square


def test_the_sizes_of_resolution_1024_are_the_common_ones():
    table = bucket_sizes(1024, 64, 2.0)
    assert {(1024, 1024), (1152, 896), (896, 1152), (1216, 832), (1344, 768)} <= set(table)


@given(SHAPES, st.sampled_from([(512,), (1024, 512), (256, 768, 1024)]), st.sampled_from(["best", "each"]))
@settings(max_examples=150, deadline=None)
def test_every_image_has_one_bucket_per_resolution(shapes, resolution, mode):
    dataset = DatasetSettings(resolution=resolution, resolution_mode=mode)
    table, columns = bucket_table(dataset), bucket_indices(dataset, images(shapes))
    assert len(columns) == (len(resolution) if mode == "each" else 1)
    for row in range(len(shapes)):
        buckets = [table[column[row]] for column in columns if column[row] != NO_BUCKET]
        assert len(buckets) == len(columns)
        areas = sorted(round(math.sqrt(b.width * b.height) / 256) * 256 for b in buckets)
        assert mode == "best" or areas == sorted(resolution)


@given(SHAPES, st.randoms())
@settings(max_examples=60, deadline=None)
def test_a_bucket_does_not_depend_on_the_other_samples(shapes, random):
    dataset = DatasetSettings(resolution=(1024, 512), upscale=False)
    separate = [int(bucket_indices(dataset, images([shape]))[0][0]) for shape in shapes]
    assert bucket_indices(dataset, images(shapes))[0].tolist() == separate


@given(SIDES, SIDES)
def test_the_nearest_aspect_ratio_is_chosen_and_in_a_tie_the_taller_size(width, height):
    table = bucket_sizes(1024, 64, 3.0)
    number = nearest_size(np.array([width], np.int32), np.array([height], np.int32), table)[0]
    distance = [abs(math.log(width / height) - math.log(w / h)) for w, h in table]
    assert distance[number] <= min(distance) + 1e-12
    # 3:2 is exactly between 1:1 and 9:4.
    tie = nearest_size(np.array([300], np.int32), np.array([200], np.int32), ((64, 64), (144, 64)))
    assert tie.tolist() == [0]


def test_the_best_resolution_is_the_largest_without_upscaling_else_the_smallest():
    dataset = DatasetSettings(resolution=(512, 1024, 768))
    table = bucket_table(dataset)
    shapes = [(4000, 3000), (1000, 1000), (900, 700), (300, 300)]
    buckets = [table[n] for n in bucket_indices(dataset, images(shapes))[0]]
    assert [(b.width, b.height) for b in buckets] == [(1152, 896), (768, 768), (576, 448), (512, 512)]


@given(SHAPES)
@settings(max_examples=100, deadline=None)
def test_without_upscale_only_samples_below_the_step_have_no_bucket(shapes):
    for mode in ("best", "each"):
        dataset = DatasetSettings(resolution=(1024, 512), upscale=False, resolution_mode=mode)
        table, columns = bucket_table(dataset), bucket_indices(dataset, images(shapes))
        for row, (width, height) in enumerate(shapes):
            buckets = [table[column[row]] for column in columns if column[row] != NO_BUCKET]
            assert all(b.width <= width and b.height <= height for b in buckets)
            assert bool(buckets) == (min(width, height) >= 64)
            if not buckets:
                assert "upscale is false" in no_bucket_reason(dataset, images(shapes), row)


@given(
    st.integers(0, 400), st.sampled_from([12.0, 16.0, 23.976, 29.97, 30.0, 60.0]), st.sampled_from([None, 8.0, 16.0])
)
def test_a_clip_gets_the_largest_frame_count_that_it_can_fill(frames, fps, target):
    available = frames_available(np.array([frames], np.int32), np.array([fps], np.float32), target)
    number = int(frame_bucket_indices(available, (81, 17, 33))[0])
    exact = frames if target is None else frames * target / fps
    fitting = [count for count in (17, 33, 81) if count <= exact + 0.01]
    assert number == len(fitting) - 1


def test_a_clip_of_exactly_the_configured_length_is_not_lost_to_rounding():
    rates = np.array([29.97, 23.976, 24000 / 1001, 59.94, 15.0], np.float32)
    for rate in rates:
        clip = frames_available(np.array([81], np.int32), np.array([rate], np.float32), float(rate))
        assert clip.tolist() == [81]


def test_the_reason_for_too_short_clips_and_audio_names_the_setting():
    clips = DatasetSettings(dataset_type=MediaKind.VIDEO, frames=(17, 33), fps=16)
    block = images([(640, 480)], frames=20, fps=30)
    assert bucket_indices(clips, block)[0].tolist() == [NO_BUCKET]
    assert "10 frames at 16 fps" in no_bucket_reason(clips, block, 0) and "17" in no_bucket_reason(clips, block, 0)
    sounds = DatasetSettings(dataset_type=MediaKind.AUDIO, audio=AudioSettings(step_seconds=2, max_seconds=7))
    block = images([(0, 0)], seconds=1.5)
    assert bucket_indices(sounds, block)[0].tolist() == [NO_BUCKET]
    assert "1.5 s" in no_bucket_reason(sounds, block, 0) and "step_seconds 2" in no_bucket_reason(sounds, block, 0)


@given(st.floats(0, 100, width=32), st.sampled_from([0.1, 0.5, 1.0, 2.5]), st.sampled_from([3.0, 10.0, 30.0]))
def test_audio_is_cut_to_whole_steps_and_to_max_seconds(seconds, step, longest):
    steps = int(audio_steps(np.array([seconds], np.float32), step, longest)[0])
    assert steps * step <= min(seconds, longest) + 1e-3
    assert (steps + 1) * step > min(seconds, longest) - 1e-3 or steps * step >= longest - step


def test_labels_and_shapes_of_audio_and_video_buckets():
    sound = bucket_table(DatasetSettings(dataset_type=MediaKind.AUDIO))[2]
    assert (sound.label, sound.shape) == ("audio 3 s, 44.1 kHz, 2 ch", (2, 132_300))
    clip = bucket_table(DatasetSettings(dataset_type=MediaKind.VIDEO, resolution=64, bucket_step=64, frames=(5,)))[0]
    assert (clip.label, clip.shape) == ("video 64×64, 5 frames", (3, 5, 64, 64))


@pytest.mark.parametrize("upscale", [True, False])
def test_a_million_images_are_assigned_within_half_a_second(upscale):
    """About 0.1 s on an idle machine."""
    rng = np.random.default_rng(0)
    width, height = (rng.integers(400, 3000, 1_000_000).astype(np.int32) for _ in range(2))
    zero = np.zeros(1_000_000, np.float32)
    begin = time.process_time()
    bucket_indices(DatasetSettings(upscale=upscale), MediaMetadataSlice(width, height, width, zero, zero))
    assert time.process_time() - begin < 0.5
