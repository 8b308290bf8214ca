"""Probing agrees with the real decoders, and incomplete images, videos and audio files are refused."""

import io
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from supertuner.core.errors import BrokenMediaError
from supertuner.core.types import MediaKind
from supertuner.data.probe import probe
from supertuner.data.probe.image import exif_orientation
from supertuner.data.probe.media_info import MAX_PIXELS
from tests.data.media_files import picture, png_claiming, sound, video


def image_info(content: bytes):
    return probe(memoryview(content), MediaKind.IMAGE)


@pytest.mark.parametrize("format", ["jpeg", "png", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_displayed_size_agrees_with_pillow_for_every_orientation(format, orientation):
    content = picture(format, (70, 50), orientation=orientation)
    with Image.open(io.BytesIO(content)) as stored:
        displayed = ImageOps.exif_transpose(stored).size
    info = image_info(content)
    assert (info.width, info.height) == displayed
    assert (info.format, info.orientation) == (format, orientation)


@pytest.mark.parametrize(
    ("format", "save"),
    [
        ("jpeg", {"progressive": True}),
        ("webp", {"lossless": True}),
        ("png", {"optimize": True}),
        ("jpeg", {"quality": 5}),
    ],
)
def test_all_encodings_of_a_format_are_supported(format, save):
    info = image_info(picture(format, (33, 65), **save))
    assert (info.width, info.height) == (33, 65)


@pytest.mark.parametrize("format", ["jpeg", "png", "webp"])
def test_every_truncation_is_detected(format):
    content = picture(format, (24, 16), orientation=6)
    for length in range(len(content) - 1):
        with pytest.raises(BrokenMediaError):
            image_info(content[:length])


def test_bytes_after_the_end_of_an_image_are_ignored():
    for format in ("jpeg", "png", "webp"):
        assert image_info(picture(format) + b"\0" * 1000 + b"trailer").width == 64


def test_the_end_marker_of_a_thumbnail_does_not_hide_truncation():
    exif = Image.Exif()
    exif[0x010F] = "x"
    thumbnail = picture("jpeg", (16, 16))
    content = picture("jpeg", (200, 200), exif=exif.tobytes() + thumbnail)
    assert image_info(content).width == 200
    with pytest.raises(BrokenMediaError, match="without its end marker"):
        image_info(content[: len(content) // 2])


@pytest.mark.parametrize("size", [(50_000, 50_000), (MAX_PIXELS + 1, 1), (0, 10)])
def test_a_decompression_bomb_or_an_empty_image_is_refused_by_its_header(size):
    with pytest.raises(BrokenMediaError, match="pixels"):
        image_info(png_claiming(*size))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"just some text", "of an unknown type"), (b"GIF89a" + bytes(50), "really gif"), (b"<html>" + bytes(50), "html")],
)
def test_the_actual_type_of_a_wrong_file_is_reported(content, message):
    with pytest.raises(BrokenMediaError, match=message):
        image_info(content)


def test_a_video_is_refused_as_an_image():
    with pytest.raises(BrokenMediaError, match="really mp4"):
        image_info(video())


@pytest.mark.parametrize("format", ["mp4", "mkv"])
def test_video_metadata(format):
    info = probe(memoryview(video(format, 12, (64, 48))), MediaKind.VIDEO)
    assert (info.width, info.height, info.frames, info.fps) == (64, 48, 12, 24)
    assert info.seconds == pytest.approx(0.5)


def test_a_rotated_video_has_its_displayed_size():
    info = probe(memoryview(video(size=(64, 48), rotation=90)), MediaKind.VIDEO)
    assert (info.width, info.height) == (48, 64)


@pytest.mark.parametrize("format", ["mp4", "mkv"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.95, 0.999])
def test_a_truncated_video_is_detected(format, share):
    content = video(format, 24)
    with pytest.raises(BrokenMediaError):
        probe(memoryview(content)[: int(len(content) * share)], MediaKind.VIDEO)


@pytest.mark.parametrize("format", ["wav", "flac", "ogg", "mp3"])
def test_audio_metadata_and_truncation(format):
    content = sound(format, 0.5, 16_000, 2)
    info = probe(memoryview(content), MediaKind.AUDIO)
    assert (info.sample_rate, info.channels) == (16_000, 2)
    assert info.seconds == pytest.approx(0.5, rel=0.01)
    with pytest.raises(BrokenMediaError):
        probe(memoryview(content)[: len(content) // 2], MediaKind.AUDIO)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["jpeg", "png", "webp"]), st.data())
def test_a_damaged_image_gives_metadata_or_broken_media_error(format, data):
    content = bytearray(picture(format, (24, 16), orientation=6))
    for _ in range(data.draw(st.integers(1, 20))):
        content[data.draw(st.integers(0, min(len(content) - 1, 400)))] = data.draw(st.integers(0, 255))
    try:
        image_info(bytes(content))
    except BrokenMediaError as error:
        assert str(error)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"II*\0", b"MM\0*", b""]))
def test_any_exif_block_has_an_orientation_from_one_to_eight(content, mark):
    assert 1 <= exif_orientation(mark + content) <= 8


def test_a_header_with_millions_of_segments_is_refused_quickly():
    content = b"\xff\xd8" + b"\xff\xe0\x00\x02" * 5_000_000
    began = time.process_time()
    with pytest.raises(BrokenMediaError, match="markers"):
        image_info(content)
    assert time.process_time() - began < 1
