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

from supertuner.core.errors import BrokenMediaError
from supertuner.core.types import MediaKind
from supertuner.data.probe import probe
from supertuner.data.probe.memoryview_file import MemoryviewFile

if TYPE_CHECKING:
    from PIL.Image import Image

RGBImage: TypeAlias = NDArray[np.uint8]

BACKGROUND = (255, 255, 255)
"""What shows through transparent pixels: white."""

MIN_REDUCED_SCALE = 2
"""A JPEG may be decoded at 1/2, 1/4 or 1/8 of its size if this many times the size that is wanted remains."""


def decode_image(payload: memoryview, target_size: tuple[int, int] | None = None) -> RGBImage:
    """The picture as HWC. With `wanted` (width, height) it may come smaller, never below REDUCING_GAP times that."""
    info = probe(payload, MediaKind.IMAGE)
    with _open_with_pillow(info.format, payload) as picture:
        profile = _non_srgb_profile(picture)
        if info.format == "jpeg" and profile is None:
            reduction = _reduction_factor(info.width, info.height, target_size)
            stored = _decode_with_turbojpeg(payload, reduction)
            if stored is not None:
                return apply_orientation(stored, info.orientation)
        return apply_orientation(_decode_with_pillow(picture, profile), info.orientation)


def _open_with_pillow(format: str, payload: memoryview) -> Image:
    """The picture's header, by Pillow. `Image.open` would warn of bombs at half the size that `probe` accepts."""
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.PngImagePlugin import PngImageFile
    from PIL.WebPImagePlugin import WebPImageFile

    readers: dict[str, Callable[[Any], Image]] = {"jpeg": JpegImageFile, "png": PngImageFile, "webp": WebPImageFile}
    return readers[format](MemoryviewFile(payload))


def apply_orientation(stored: RGBImage, orientation: int) -> RGBImage:
    """Apply an EXIF orientation, 1 to 8."""
    if orientation in (5, 6, 7, 8):
        stored = stored.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        stored = stored[:, ::-1]
    if orientation in (3, 4, 7, 8):
        stored = stored[::-1]
    return np.ascontiguousarray(stored)


def _reduction_factor(width: int, height: int, target_size: tuple[int, int] | None) -> int:
    if target_size is None:
        return 1
    spare = min(width / target_size[0], height / target_size[1]) / MIN_REDUCED_SCALE
    return max((factor for factor in (1, 2, 4, 8) if factor <= spare), default=1)


def _decode_with_turbojpeg(payload: memoryview, reduction: int) -> RGBImage | None:
    """None where Pillow should try: other colour spaces, and files with faults that may or may not matter."""
    import simplejpeg

    height, width, color_space, _ = simplejpeg.decode_jpeg_header(payload)
    if color_space not in ("YCbCr", "RGB", "Gray"):
        return None
    min_size = {} if reduction == 1 else {"min_width": -(-width // reduction), "min_height": -(-height // reduction)}
    try:
        decoded: RGBImage = simplejpeg.decode_jpeg(payload, **min_size)
    except ValueError:  # libjpeg warned or failed; Pillow passes over warnings and says what a failure is
        return None
    return decoded


def _decode_with_pillow(picture: Image, profile: Any) -> RGBImage:
    from PIL import Image

    picture.load()
    if picture.mode.startswith("I") or picture.mode == "F":
        return _decode_deep_grey(picture)
    if picture.has_transparency_data:
        layer = picture.convert("RGBA")
        picture = Image.new("RGB", picture.size, BACKGROUND)
        picture.paste(layer, mask=layer.getchannel("A"))
    if profile is not None:
        picture = _convert_to_srgb(picture, profile)
    return np.array(picture.convert("RGB"))


def _decode_deep_grey(picture: Image) -> RGBImage:
    values = np.asarray(picture).astype(np.float64)
    if values.min() < 0 or values.max() > 65535:
        raise BrokenMediaError(f"grey values from {values.min():g} to {values.max():g}; 0 to 65535 can be used")
    grey = np.rint(values / 257).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)


def _non_srgb_profile(picture: Image) -> Any:
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


def _convert_to_srgb(picture: Image, profile: Any) -> Image:
    from PIL import ImageCms

    color_mode = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}.get(profile.profile.xcolor_space)
    if color_mode is None or (picture.mode != color_mode and "CMYK" in (picture.mode, color_mode)):
        return picture
    try:
        converted = ImageCms.profileToProfile(
            picture if picture.mode == color_mode else picture.convert(color_mode),
            profile,
            ImageCms.createProfile("sRGB"),
            renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
            outputMode="RGB",
        )
    except ImageCms.PyCMSError:  # a profile that cannot be applied says nothing about the pixels
        return picture
    return picture if converted is None else converted
