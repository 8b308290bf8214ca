"""Headers are read as the real decoders read them, and whatever is not a whole picture, video or sound is refused."""

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


def image_facts(content: bytes):
    return probe(memoryview(content), MediaKind.IMAGE)


@pytest.mark.parametrize("format", ["jpeg", "png", "webp"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_displayed_size_agrees_with_pillow_for_every_orientation(format, turn):
    content = picture(format, (70, 50), orientation=turn)
    with Image.open(io.BytesIO(content)) as stored:
        shown = ImageOps.exif_transpose(stored).size
    facts = image_facts(content)
    assert (facts.width, facts.height) == shown
    assert (facts.format, facts.orientation) == (format, turn)


@pytest.mark.parametrize(
    ("format", "save"),
    [
        ("jpeg", {"progressive": True}),
        ("webp", {"lossless": True}),
        ("png", {"optimize": True}),
        ("jpeg", {"quality": 5}),
    ],
)
def test_other_ways_to_save_a_picture_are_understood(format, save):
    facts = image_facts(picture(format, (33, 65), **save))
    assert (facts.width, facts.height) == (33, 65)


@pytest.mark.parametrize("format", ["jpeg", "png", "webp"])
def test_every_truncation_is_found(format):
    content = picture(format, (24, 16), orientation=6)
    for length in range(len(content) - 1):
        with pytest.raises(BrokenMediaError):
            image_facts(content[:length])


def test_bytes_after_the_end_of_a_picture_do_no_harm():
    for format in ("jpeg", "png", "webp"):
        assert image_facts(picture(format) + b"\0" * 1000 + b"trailer").width == 64


def test_a_thumbnail_does_not_hide_that_the_picture_around_it_is_truncated():
    exif = Image.Exif()
    exif[0x010F] = "x"
    thumbnail = picture("jpeg", (16, 16))
    content = picture("jpeg", (200, 200), exif=exif.tobytes() + thumbnail)
    assert image_facts(content).width == 200
    with pytest.raises(BrokenMediaError, match="without its end marker"):
        image_facts(content[: len(content) // 2])


@pytest.mark.parametrize("size", [(50_000, 50_000), (MAX_PIXELS + 1, 1), (0, 10)])
def test_a_picture_that_would_fill_memory_or_has_no_size_is_refused_by_its_header(size):
    with pytest.raises(BrokenMediaError, match="pixels"):
        image_facts(png_claiming(*size))


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"just some text", "nobody here knows"), (b"GIF89a" + bytes(50), "really gif"), (b"<html>" + bytes(50), "html")],
)
def test_a_file_of_another_type_is_named(content, says):
    with pytest.raises(BrokenMediaError, match=says):
        image_facts(content)


def test_a_video_is_not_a_picture():
    with pytest.raises(BrokenMediaError, match="really mp4"):
        image_facts(video())


@pytest.mark.parametrize("format", ["mp4", "mkv"])
def test_video_facts(format):
    facts = probe(memoryview(video(format, 12, (64, 48))), MediaKind.VIDEO)
    assert (facts.width, facts.height, facts.frames, facts.fps) == (64, 48, 12, 24)
    assert facts.seconds == pytest.approx(0.5)


def test_a_turned_video_is_as_wide_as_it_is_displayed():
    facts = probe(memoryview(video(size=(64, 48), rotation=90)), MediaKind.VIDEO)
    assert (facts.width, facts.height) == (48, 64)


@pytest.mark.parametrize("format", ["mp4", "mkv"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.95, 0.999])
def test_a_truncated_video_is_found(format, share):
    content = video(format, 24)
    with pytest.raises(BrokenMediaError):
        probe(memoryview(content)[: int(len(content) * share)], MediaKind.VIDEO)


@pytest.mark.parametrize("format", ["wav", "flac", "ogg", "mp3"])
def test_sound_facts_and_truncation(format):
    content = sound(format, 0.5, 16_000, 2)
    facts = probe(memoryview(content), MediaKind.AUDIO)
    assert (facts.sample_rate, facts.channels) == (16_000, 2)
    assert facts.seconds == pytest.approx(0.5, rel=0.01)
    with pytest.raises(BrokenMediaError):
        probe(memoryview(content)[: len(content) // 2], MediaKind.AUDIO)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["jpeg", "png", "webp"]), st.data())
def test_a_damaged_picture_gives_facts_or_a_reason_and_never_another_error(format, data):
    content = bytearray(picture(format, (24, 16), orientation=6))
    for _ in range(data.draw(st.integers(1, 20))):
        content[data.draw(st.integers(0, min(len(content) - 1, 400)))] = data.draw(st.integers(0, 255))
    try:
        image_facts(bytes(content))
    except BrokenMediaError as error:
        assert str(error)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"II*\0", b"MM\0*", b""]))
def test_any_exif_block_has_an_orientation_from_one_to_eight(content, mark):
    assert 1 <= exif_orientation(mark + content) <= 8


def test_a_header_of_endless_segments_is_given_up_quickly():
    content = b"\xff\xd8" + b"\xff\xe0\x00\x02" * 5_000_000
    began = time.process_time()
    with pytest.raises(BrokenMediaError, match="segments"):
        image_facts(content)
    assert time.process_time() - began < 1
