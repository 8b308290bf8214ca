"""Still pictures: JPEG, PNG or WebP bytes to RGB as a viewer shows it, 8 bits a colour.

JPEG goes through libjpeg-turbo (simplejpeg: 1.5 times as fast as Pillow here, the same bits); CMYK, anything unusual
and the other formats through Pillow. Orientation is applied. Transparent pictures are laid on BACKGROUND. Colours with
a profile other than sRGB are converted to sRGB; a profile that cannot be used is ignored. Of 16 bits the upper 8 are
kept, rounded. Of a moving picture the first frame is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from supertuner.core.errors import BrokenMedia
from supertuner.core.types import MediaKind
from supertuner.data.probe import probe
from supertuner.data.probe.window import Window

if TYPE_CHECKING:
    from PIL.Image import Image

RGB: TypeAlias = NDArray[np.uint8]

BACKGROUND = (255, 255, 255)
"""What shows through transparent pixels: white."""

REDUCING_GAP = 2
"""A JPEG may be decoded at 1/2, 1/4 or 1/8 of its size if this many times the size that is wanted remains."""


def decode_image(payload: memoryview, wanted: tuple[int, int] | None = None) -> RGB:
    """The picture as HWC. With `wanted` (width, height) it may come smaller, never below REDUCING_GAP times that."""
    facts = probe(payload, MediaKind.IMAGE)
    with _opened(facts.format, payload) as picture:
        profile = _foreign_profile(picture)
        if facts.format == "jpeg" and profile is None:
            reduced = _reduction(facts.width, facts.height, wanted)
            stored = _turbo(payload, reduced)
            if stored is not None:
                return upright(stored, facts.orientation)
        return upright(_pillow(picture, profile), facts.orientation)


def _opened(format: str, payload: memoryview) -> Image:
    """The picture's header, by Pillow. `Image.open` would warn of bombs at half the size that `probe` accepts."""
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.PngImagePlugin import PngImageFile
    from PIL.WebPImagePlugin import WebPImageFile

    readers: dict[str, Callable[[Any], Image]] = {"jpeg": JpegImageFile, "png": PngImageFile, "webp": WebPImageFile}
    return readers[format](Window(payload))


def upright(stored: RGB, orientation: int) -> RGB:
    """Apply an EXIF orientation, 1 to 8."""
    if orientation in (5, 6, 7, 8):
        stored = stored.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        stored = stored[:, ::-1]
    if orientation in (3, 4, 7, 8):
        stored = stored[::-1]
    return np.ascontiguousarray(stored)


def _reduction(width: int, height: int, wanted: tuple[int, int] | None) -> int:
    if wanted is None:
        return 1
    spare = min(width / wanted[0], height / wanted[1]) / REDUCING_GAP
    return max((factor for factor in (1, 2, 4, 8) if factor <= spare), default=1)


def _turbo(payload: memoryview, reduced: int) -> RGB | None:
    """None where Pillow should try: other colour spaces, and files with faults that may or may not matter."""
    import simplejpeg

    height, width, space, _ = simplejpeg.decode_jpeg_header(payload)
    if space not in ("YCbCr", "RGB", "Gray"):
        return None
    least = {} if reduced == 1 else {"min_width": -(-width // reduced), "min_height": -(-height // reduced)}
    try:
        decoded: RGB = simplejpeg.decode_jpeg(payload, **least)
    except ValueError:  # libjpeg warned or failed; Pillow passes over warnings and says what a failure is
        return None
    return decoded


def _pillow(picture: Image, profile: Any) -> RGB:
    from PIL import Image

    picture.load()
    if picture.mode.startswith("I") or picture.mode == "F":
        return _deep_grey(picture)
    if picture.has_transparency_data:
        layer = picture.convert("RGBA")
        picture = Image.new("RGB", picture.size, BACKGROUND)
        picture.paste(layer, mask=layer.getchannel("A"))
    if profile is not None:
        picture = _to_srgb(picture, profile)
    return np.array(picture.convert("RGB"))


def _deep_grey(picture: Image) -> RGB:
    values = np.asarray(picture).astype(np.float64)
    if values.min() < 0 or values.max() > 65535:
        raise BrokenMedia(f"grey values from {values.min():g} to {values.max():g}; 0 to 65535 can be used")
    grey = np.rint(values / 257).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)


def _foreign_profile(picture: Image) -> Any:
    """The picture's colour profile, if it has one that can be read and is not sRGB itself."""
    embedded = picture.info.get("icc_profile")
    if not embedded:
        return None
    from PIL import ImageCms

    try:
        profile = ImageCms.ImageCmsProfile(BytesIO(embedded))
        return None if "srgb" in ImageCms.getProfileDescription(profile).lower() else profile
    except (ImageCms.PyCMSError, OSError):  # a damaged profile says nothing about the pixels
        return None


def _to_srgb(picture: Image, profile: Any) -> Image:
    from PIL import ImageCms

    space = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}.get(profile.profile.xcolor_space)
    if space is None or (picture.mode != space and "CMYK" in (picture.mode, space)):
        return picture
    try:
        converted = ImageCms.profileToProfile(
            picture if picture.mode == space else picture.convert(space),
            profile,
            ImageCms.createProfile("sRGB"),
            renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
            outputMode="RGB",
        )
    except ImageCms.PyCMSError:  # a profile that cannot be applied says nothing about the pixels
        return picture
    return picture if converted is None else converted
