"""Video decodes to exactly the requested frames by timestamp; damaged bytes raise BrokenMediaError."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supertuner.core.errors import BrokenMediaError
from supertuner.data.decode import raising_broken_media
from supertuner.data.decode.video import choose_frames, decode_video


def counting_clip(
    times: Sequence[float], format: str = "mp4", codec: str = "libx264", gop: int = 8, rotation: int = 0
) -> memoryview:
    """A clip whose n-th frame is displayed at times[n] and has the grey value 5 · n (mod 250)."""
    out = io.BytesIO()
    with av.open(out, "w", format=format) as container:
        stream = container.add_stream(codec, rate=20)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 64, 48, "yuv420p", gop
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000) if format != "avi" else Fraction(1, 20)
        stream.bit_rate = 4_000_000
        if rotation:
            stream.set_display_rotation(rotation)
        for number, time in enumerate(times):
            pixels = np.full((48, 64, 3), 5 * number % 250, np.uint8)
            pixels[:16, :16] = (255, 0, 0)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.time_base = stream.time_base
            frame.pts = round(time / float(stream.time_base))
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return memoryview(out.getvalue())


def numbers(frames) -> list[int]:
    return [round(float(frame[24:, 32:].mean()) / 5) for frame in frames]


EVEN = [n / 20 for n in range(40)]


@pytest.mark.parametrize("first", [0, 1, 7, 8, 23, 30])
def test_consecutive_frames_from_any_first_frame(first):
    assert numbers(decode_video(counting_clip(EVEN), first, 10, None)) == list(range(first, first + 10))


def test_a_first_frame_too_close_to_the_end_is_moved_towards_the_beginning():
    assert numbers(decode_video(counting_clip(EVEN), 35, 10, None)) == list(range(30, 40))


def test_half_the_rate_skips_every_second_frame_and_twice_the_rate_repeats_each():
    clip = counting_clip(EVEN)
    assert numbers(decode_video(clip, 3, 8, 10.0)) == list(range(6, 22, 2))
    assert numbers(decode_video(clip, 0, 6, 40.0)) == [0, 0, 1, 1, 2, 2]


def test_with_a_variable_rate_the_frame_displayed_at_that_time_is_used():
    times = [0.0, 0.05, 0.1, 0.5, 0.55, 1.0, 1.05, 1.1, 1.2]
    assert numbers(decode_video(counting_clip(times), 0, 10, 10.0)) == [0, 2, 2, 2, 2, 3, 4, 4, 4, 4]
    assert numbers(decode_video(counting_clip(times), 2, 3, None)) == [2, 3, 4]


def test_a_clip_whose_timestamps_do_not_begin_at_zero():
    times = [1.5 + time for time in EVEN]
    assert numbers(decode_video(counting_clip(times, "matroska"), 4, 3, None)) == [4, 5, 6]
    assert numbers(decode_video(counting_clip(times, "matroska"), 2, 3, 10.0)) == [4, 6, 8]


@pytest.mark.parametrize("codec", ["mpeg4", "libx264"])
def test_frames_of_avi_without_timestamps_are_counted(codec):
    clip = counting_clip(EVEN, "avi", codec)
    assert numbers(decode_video(clip, 5, 4, None)) == [5, 6, 7, 8]
    assert numbers(decode_video(clip, 1, 3, 10.0)) == [2, 4, 6]


@pytest.mark.parametrize(("degrees", "corner"), [(90, (-1, 0)), (180, (-1, -1)), (-90, (0, -1)), (270, (0, -1))])
def test_the_container_s_rotation_is_applied_counterclockwise(degrees, corner):
    (frame,) = decode_video(counting_clip(EVEN, rotation=degrees), 0, 1, None)
    assert frame.shape == ((64, 48, 3) if degrees % 180 else (48, 64, 3))
    red = frame[8 if corner[0] == 0 else -8, 8 if corner[1] == 0 else -8]
    assert red[0] > 200 and red[1] < 60, red


def test_colours_are_preserved():
    (frame,) = decode_video(counting_clip(EVEN), 0, 1, None)
    assert np.abs(frame[4, 4].astype(int) - (255, 0, 0)).max() < 12


def test_too_few_frames_are_refused():
    with pytest.raises(BrokenMediaError, match="has 40 frames, expected 41"):
        list(decode_video(counting_clip(EVEN), 0, 41, None))
    with pytest.raises(BrokenMediaError, match="has 20 frames at 10 fps, expected 40"):
        list(decode_video(counting_clip(EVEN), 0, 40, 10.0))


@given(
    st.lists(st.floats(0.01, 0.5), min_size=1, max_size=40),
    st.integers(0, 50),
    st.integers(1, 20),
    st.sampled_from([None, 4.0, 16.0, 30.0]),
)
def test_chosen_frames_are_ascending_and_exist(steps, first, count, fps):
    seconds = np.cumsum(steps)
    try:
        picks = choose_frames(seconds, first, count, fps)
    except BrokenMediaError:
        assert count > (len(steps) if fps is None else (seconds[-1] - seconds[0]) * fps)
        return
    assert len(picks) == count and (np.diff(picks) >= 0).all() and picks[0] >= 0 and picks[-1] < len(steps)


COMPLETE = {
    "mp4": counting_clip(EVEN),
    "matroska": counting_clip(EVEN, "matroska"),
    "avi": counting_clip(EVEN, "avi", "mpeg4"),
}


@given(st.sampled_from(sorted(COMPLETE)), st.data())
@settings(max_examples=250, deadline=None)
def test_damaged_bytes_raise_broken_media_error_or_decode(format, data):
    content = bytearray(COMPLETE[format])
    for _ in range(data.draw(st.integers(0, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    try:
        with raising_broken_media("clip"):
            frames = list(
                decode_video(memoryview(bytes(content[:cut])), 3, 9, data.draw(st.sampled_from([None, 10.0])))
            )
    except BrokenMediaError as error:
        assert str(error).startswith("clip: ")
    else:
        assert len(frames) == 9 and all(frame.ndim == 3 for frame in frames)
