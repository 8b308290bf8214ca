"""Images of all formats decode to what a viewer shows; damaged bytes raise only BrokenMediaError."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from supertuner.core.errors import BrokenMediaError
from supertuner.data.decode import raising_broken_media
from supertuner.data.decode.image import MIN_REDUCED_SCALE, decode_image
from tests.data.media_files import picture, png_claiming


def smooth(size: tuple[int, int]) -> Image.Image:
    noise = np.random.default_rng(3).integers(0, 255, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, format: str, **options) -> memoryview:
    out = io.BytesIO()
    image.save(out, format, **options)
    return memoryview(out.getvalue())


def by_pillow(content: memoryview) -> np.ndarray:
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 1}, {"quality": 30}]
)
def test_jpeg_has_the_same_pixels_as_with_pillow(options):
    content = encoded(smooth((150, 101)), "JPEG", **options)
    assert np.array_equal(decode_image(content), by_pillow(content))


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
def test_jpeg_of_every_colour_space_becomes_rgb(mode):
    content = encoded(smooth((64, 48)).convert(mode), "JPEG", quality=95)
    decoded = decode_image(content)
    assert decoded.shape == (48, 64, 3) and np.abs(decoded.astype(int) - by_pillow(content)).max() <= 1


@pytest.mark.parametrize("format", ["jpeg", "png", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_applied(format, orientation):
    content = memoryview(
        picture(format, (40, 24), orientation=orientation, **({"quality": 100} if format != "png" else {}))
    )
    assert np.array_equal(decode_image(content), by_pillow(content))


def test_transparent_pixels_show_the_white_background():
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    clear.putpixel((0, 0), (0, 0, 255, 255))
    clear.putpixel((1, 0), (0, 0, 0, 128))
    for format in ("PNG", "WEBP"):
        decoded = decode_image(encoded(clear, format, lossless=True))
        assert decoded[4, 4].tolist() == [255, 255, 255] and decoded[0, 0].tolist() == [0, 0, 255]
        assert abs(int(decoded[0, 1, 0]) - 127) <= 1


def test_palettes_with_and_without_a_transparent_colour():
    palette = smooth((32, 32)).quantize(16)
    assert np.array_equal(decode_image(encoded(palette, "PNG")), np.asarray(palette.convert("RGB")))
    content = encoded(palette, "PNG", transparency=palette.getpixel((5, 5)))
    assert decode_image(content)[5, 5].tolist() == [255, 255, 255]
    grey = smooth((16, 16)).convert("LA")
    assert decode_image(encoded(grey, "PNG"))[3, 3].tolist() == [grey.getpixel((3, 3))[0]] * 3


def test_sixteen_bit_values_are_rounded_to_eight_bits():
    values = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    decoded = decode_image(encoded(Image.fromarray(values), "PNG"))
    assert np.array_equal(decoded[:, :, 0], np.arange(256).reshape(16, 16)) and decoded.shape == (16, 16, 3)


def test_colours_of_another_profile_are_converted_and_a_broken_profile_is_ignored():
    dark = Image.new("RGB", (16, 16), (55, 55, 55))
    for format in ("PNG", "JPEG"):
        linear = decode_image(encoded(dark, format, icc_profile=linear_light_profile()))
        assert 124 <= int(linear[8, 8, 0]) <= 130, "55/255 of linear light is half grey in sRGB"
        broken = decode_image(encoded(dark, format, icc_profile=b"not a profile"))
        assert abs(int(broken[8, 8, 0]) - 55) <= 1


def test_a_large_jpeg_is_decoded_at_reduced_size_and_looks_the_same():
    image = smooth((2000, 1500))
    content = encoded(image, "JPEG", quality=95)
    full, reduced = decode_image(content), decode_image(content, target_size=(240, 180))
    assert full.shape == (1500, 2000, 3) and reduced.shape == (375, 500, 3)
    assert reduced.shape[0] >= MIN_REDUCED_SCALE * 180
    thumbnails = [
        np.asarray(Image.fromarray(pixels).resize((240, 180), Image.Resampling.LANCZOS)).astype(int)
        for pixels in (full, reduced)
    ]
    assert np.abs(thumbnails[0] - thumbnails[1]).max() <= 4


def test_a_decompression_bomb_is_refused_before_decoding():
    with pytest.raises(BrokenMediaError, match="bomb"):
        decode_image(memoryview(png_claiming(60_000, 60_000)))


def test_an_image_of_a_large_camera_is_decoded_without_a_warning():
    """Its size is between Pillow's warning and our limit; the suite turns warnings into errors."""
    content = encoded(Image.new("L", (12_000, 8_000), 77), "PNG")
    assert decode_image(content)[-1, -1].tolist() == [77, 77, 77]


COMPLETE = {
    "jpeg": picture("jpeg", (48, 40), orientation=6),
    "progressive": picture("jpeg", (48, 40), progressive=True),
    "png": picture("png", (24, 20)),
    "webp": picture("webp", (48, 40)),
    "lossless webp": picture("webp", (24, 20), lossless=True),
}


@given(st.sampled_from(sorted(COMPLETE)), st.data())
@settings(max_examples=600, deadline=None)
def test_damaged_bytes_raise_broken_media_error_with_the_label_or_decode(name, data):
    content = bytearray(COMPLETE[name])
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    try:
        with raising_broken_media("datasets[cats], sample 'a'"):
            decoded = decode_image(memoryview(bytes(content[:cut])))
    except BrokenMediaError as error:
        assert str(error).startswith("datasets[cats], sample 'a': ")
    else:
        assert decoded.dtype == np.uint8 and decoded.ndim == 3 and decoded.shape[2] == 3


def linear_light_profile() -> bytes:
    """A colour profile with sRGB's primaries and linear gamma, by the ICC specification (ICC.1:2001, matrix/TRC)."""

    def xyz(*values: float) -> bytes:
        return b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(v * 65536) for v in values))

    text = b"text\0\0\0\0none\0"
    name = b"Linear light\0"
    described = b"desc\0\0\0\0" + struct.pack(">I", len(name)) + name + bytes(78)
    curve = b"curv\0\0\0\0" + struct.pack(">I", 0)
    tags = {
        b"desc": described,
        b"cprt": text,
        b"wtpt": xyz(0.9642, 1.0, 0.8249),
        b"rXYZ": xyz(0.4360, 0.2225, 0.0139),
        b"gXYZ": xyz(0.3851, 0.7169, 0.0971),
        b"bXYZ": xyz(0.1431, 0.0606, 0.7139),
        b"rTRC": curve,
        b"gTRC": curve,
        b"bTRC": curve,
    }
    table, body = struct.pack(">I", len(tags)), b""
    at = 128 + 4 + 12 * len(tags)
    for tag, content in tags.items():
        padded = content + bytes(-len(content) % 4)
        table += tag + struct.pack(">II", at + len(body), len(content))
        body += padded
    head = bytearray(128)
    head[0:4] = struct.pack(">I", 128 + len(table) + len(body))
    head[8:12] = bytes.fromhex("02400000")
    head[12:24] = b"mntrRGB XYZ "
    head[24:36] = struct.pack(">6H", 2020, 1, 1, 0, 0, 0)
    head[36:40] = b"acsp"
    head[68:80] = struct.pack(">3i", 63190, 65536, 54061)
    return bytes(head) + table + body
