"""Decodes JPEG, PNG and WebP to 8-bit RGB as an image viewer shows them.

libjpeg-turbo decodes JPEG (by simplejpeg: 1.5 times as fast as Pillow here, with the same bits); Pillow decodes CMYK,
unusual JPEG and the other formats. EXIF orientation is applied. Transparent images are composited over BACKGROUND.
Colours with a profile other than sRGB are converted to sRGB; an unusable profile is ignored. 16-bit values are rounded
to 8 bits. Of an animation, the first frame is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from supertuner.core.errors import BrokenMediaError
from supertuner.core.types import MediaKind
from supertuner.data.probe import probe
from supertuner.data.probe.media_info import MediaInfo
from supertuner.data.probe.memoryview_file import MemoryviewFile

if TYPE_CHECKING:
    from PIL.Image import Image

RGBImage: TypeAlias = NDArray[np.uint8]

BACKGROUND = (255, 255, 255)
"""Colour behind transparent pixels: white."""

MIN_REDUCED_SCALE = 2
"""A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if at least this many times the target size remains."""


# Peak bytes per pixel of the stored image: measured (tests/data/test_decode_memory.py), rounded up.
_JPEG_COEFFICIENT_BYTES = 6
"""libjpeg keeps all coefficients of a progressive image: 2 bytes for each of up to three components."""
_RGB_BYTES = 3
_PILLOW_BYTES = 16
"""Pillow's image (4 bytes per pixel) and its conversion to RGB, its bytes twice, and the array."""
_PROFILE_BYTES, _TRANSPARENCY_BYTES, _WEBP_BYTES = 4, 8, 12
"""In addition: a conversion of the colours; the layers that are composited; libwebp's canvases."""
_DEEP_GREY_BYTES = 32
"""Pillow's image and three arrays of float64."""


@dataclass(frozen=True, eq=False, slots=True)
class EncodedImage:
    """An image whose header was read, and whose pixels were not."""

    payload: memoryview
    info: MediaInfo
    _image: Image
    """Pillow's image, not loaded."""
    _profile: Any
    """The colour profile to convert from; None for sRGB."""

    @classmethod
    def open(cls, payload: memoryview) -> EncodedImage:
        """Raises BrokenMediaError or errors of Pillow if the file is not an image, or a decompression bomb."""
        info = probe(payload, MediaKind.IMAGE)
        image = _open_with_pillow(info.format, payload)
        return cls(payload, info, image, _non_srgb_profile(image))

    def decode(self, target_size: tuple[int, int] | None = None) -> RGBImage:
        """The image as [H, W, C]. With `target_size` (width, height) it may be smaller than stored, but not smaller
        than MIN_REDUCED_SCALE times that."""
        if self._is_for_turbojpeg:
            stored = _decode_with_turbojpeg(self.payload, self._reduction(target_size))
            if stored is not None:
                return apply_orientation(stored, self.info.orientation)
        return apply_orientation(_decode_with_pillow(self._image, self._profile), self.info.orientation)

    def peak_bytes(self, target_size: tuple[int, int] | None = None) -> int:
        """Estimate of the memory that `decode`, cropping and resizing need at most, without what is written in the
        target's size. A JPEG that libjpeg-turbo refuses because of a fault needs up to twice as much."""
        pixels = self.info.width * self.info.height
        if self._is_for_turbojpeg:
            return _JPEG_COEFFICIENT_BYTES * pixels + _RGB_BYTES * pixels // self._reduction(target_size) ** 2
        if _is_deep_grey(self._image):
            return _DEEP_GREY_BYTES * pixels
        per_pixel = _PILLOW_BYTES + (_PROFILE_BYTES if self._profile is not None else 0)
        per_pixel += _TRANSPARENCY_BYTES if self._image.has_transparency_data else 0
        return (per_pixel + (_WEBP_BYTES if self.info.format == "webp" else 0)) * pixels

    @property
    def _is_for_turbojpeg(self) -> bool:
        return self.info.format == "jpeg" and self._profile is None and self._image.mode in ("L", "RGB")

    def _reduction(self, target_size: tuple[int, int] | None) -> int:
        return _reduction_factor(self.info.width, self.info.height, target_size)


def decode_image(payload: memoryview, target_size: tuple[int, int] | None = None) -> RGBImage:
    """The image of a file. See `EncodedImage.decode`."""
    return EncodedImage.open(payload).decode(target_size)


def _open_with_pillow(format: str, payload: memoryview) -> Image:
    """Read the header with Pillow. `Image.open` would warn of bombs at half the size that `probe` accepts."""
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
    """None if Pillow should decode it instead: other colour spaces, and files with possibly harmless faults."""
    import simplejpeg

    height, width, color_space, _ = simplejpeg.decode_jpeg_header(payload)
    if color_space not in ("YCbCr", "RGB", "Gray"):
        return None
    min_size = {} if reduction == 1 else {"min_width": -(-width // reduction), "min_height": -(-height // reduction)}
    try:
        decoded: RGBImage = simplejpeg.decode_jpeg(payload, **min_size)
    except ValueError:  # libjpeg warned or failed; Pillow ignores warnings and explains failures
        return None
    return decoded


def _decode_with_pillow(image: Image, profile: Any) -> RGBImage:
    from PIL import Image

    image.load()
    if _is_deep_grey(image):
        return _decode_deep_grey(image)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.new("RGB", image.size, BACKGROUND)
        image.paste(layer, mask=layer.getchannel("A"))
    if profile is not None:
        image = _convert_to_srgb(image, profile)
    return np.array(image.convert("RGB"))


def _is_deep_grey(image: Image) -> bool:
    return image.mode.startswith("I") or image.mode == "F"


def _decode_deep_grey(image: Image) -> RGBImage:
    values = np.asarray(image).astype(np.float64)
    if values.min() < 0 or values.max() > 65535:
        raise BrokenMediaError(f"grey values from {values.min():g} to {values.max():g}; only 0 to 65535 are supported")
    grey = np.rint(values / 257).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)


def _non_srgb_profile(image: Image) -> Any:
    """The image's colour profile; None if it has none, an unreadable one, or sRGB."""
    embedded = image.info.get("icc_profile")
    if not embedded:
        return None
    from PIL import ImageCms

    try:
        profile = ImageCms.ImageCmsProfile(BytesIO(embedded))
        return None if "srgb" in ImageCms.getProfileDescription(profile).lower() else profile
    except (ImageCms.PyCMSError, OSError):  # a damaged profile does not make the pixels unusable
        return None


def _convert_to_srgb(image: Image, profile: Any) -> Image:
    from PIL import ImageCms

    color_mode = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}.get(profile.profile.xcolor_space)
    if color_mode is None or (image.mode != color_mode and "CMYK" in (image.mode, color_mode)):
        return image
    source = image if image.mode == color_mode else image.convert(color_mode)
    srgb, intent = ImageCms.createProfile("sRGB"), ImageCms.Intent.RELATIVE_COLORIMETRIC
    try:
        converted = ImageCms.profileToProfile(source, profile, srgb, renderingIntent=intent, outputMode="RGB")
    except ImageCms.PyCMSError:  # a profile that cannot be applied does not make the pixels unusable
        return image
    return image if converted is None else converted
