"""Crops the largest part of an image that has the bucket's aspect ratio, and resizes it to the bucket's size.

Filters are antialiased. Torch resizes if it has the filter for 8-bit images: vectorised, about four times as fast as
Pillow, and within 3 of 255 of its result (mean difference below 0.01). "area" is Pillow's box filter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

LANCZOS_TORCH_VERSION = (2, 13)
"""The first torch version with Lanczos for 8-bit images, on AVX2 and NEON (PyTorch pull request 177320)."""

ResizeFilter: TypeAlias = Literal["lanczos", "bicubic", "bilinear", "area"]


@dataclass(frozen=True, slots=True)
class CropBox:
    """A rectangle of an image, in whole pixels."""

    left: int
    top: int
    width: int
    height: int


def crop_box(width: int, height: int, target_width: int, target_height: int, crop_x: float, crop_y: float) -> CropBox:
    """The largest rectangle of width × height with the target's aspect ratio (to the nearest pixel).

    `crop_x` and `crop_y`, from 0 to 1, are its position within the margin that is cut off.
    """
    if width * target_height > height * target_width:
        crop_width, crop_height = max(1, round(height * target_width / target_height)), height
    else:
        crop_width, crop_height = width, max(1, round(width * target_height / target_width))
    crop_width, crop_height = min(crop_width, width), min(crop_height, height)
    left, top = round((width - crop_width) * crop_x), round((height - crop_height) * crop_y)
    return CropBox(left, top, crop_width, crop_height)


def crop_and_resize(
    image_HWC: NDArray[np.uint8], box: CropBox, width: int, height: int, resize_filter: ResizeFilter
) -> torch.Tensor:
    """The part `box` of an RGB image, resized to width × height, as uint8 [C, H, W]."""
    import torch

    crop = np.ascontiguousarray(image_HWC[box.top : box.top + box.height, box.left : box.left + box.width])
    if (box.width, box.height) != (width, height) and not torch_supports_filter(resize_filter):
        return _resize_with_pillow(crop, width, height, resize_filter)
    planes = torch.from_numpy(crop).permute(2, 0, 1)
    if (box.width, box.height) == (width, height):
        return planes
    return torch.nn.functional.interpolate(planes[None], (height, width), mode=resize_filter, antialias=True)[0]


def torch_supports_filter(resize_filter: ResizeFilter) -> bool:
    """Whether the installed torch supports the filter for 8-bit images."""
    import torch

    if resize_filter != "lanczos":
        return resize_filter != "area"
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= LANCZOS_TORCH_VERSION


def _resize_with_pillow(part_HWC: NDArray[np.uint8], width: int, height: int, name: ResizeFilter) -> torch.Tensor:
    import torch
    from PIL import Image

    resample = Image.Resampling.BOX if name == "area" else Image.Resampling[name.upper()]
    image = Image.fromarray(part_HWC).resize((width, height), resample)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
