"""Augmentation: draws crop, flip and colour changes of a sample as a pure function of settings and SampleRng.

All colour changes are combined into one affine map of RGB, so that each pixel is rounded once, and every frame of a
clip gets the same map.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi, sin
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from supertuner.config.settings.data import AugmentSettings
from supertuner.data.batching.sample_rng import SampleRng

if TYPE_CHECKING:
    import torch

AffineColourMap: TypeAlias = NDArray[np.float64]
"""A 3 × 4 matrix: out = matrix[:, :3] @ rgb + matrix[:, 3], with colours from 0 to 1."""

LUMA = np.array([0.299, 0.587, 0.114])
"""Luma weights of ITU-R BT.601, which JPEG uses."""

_TO_YIQ = np.array([LUMA, [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
"""RGB to YIQ, the NTSC colour space, in which hue is an angle around the grey axis."""


@dataclass(frozen=True, slots=True)
class AugmentationParams:
    """The augmentation of a sample in one cycle."""

    flip: bool = False
    crop_x: float = 0.5
    """Horizontal position of the crop within the available margin: 0 left, 1 right."""
    crop_y: float = 0.5
    """Vertical position: 0 top, 1 bottom."""
    crop_time: float = 0.5
    """Position of the clip in time: 0 at the beginning, 1 at the end."""
    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0
    hue: float = 0.0
    """Rotation of hue, as a fraction of the full circle."""


def draw_augmentation(augment: AugmentSettings, random_crop: bool, rng: SampleRng) -> AugmentationParams:
    """Draw the augmentation. A random crop also moves the clip in time."""
    max_shift = 1.0 if random_crop else augment.crop_jitter
    return AugmentationParams(
        flip=rng.uniform("flip") < augment.flip,
        crop_x=0.5 + max_shift * (rng.uniform("across") - 0.5),
        crop_y=0.5 + max_shift * (rng.uniform("down") - 0.5),
        crop_time=0.5 + (1.0 if random_crop else 0.0) * (rng.uniform("along") - 0.5),
        brightness=rng.uniform_between(1 - augment.brightness, 1 + augment.brightness, "brightness"),
        contrast=rng.uniform_between(1 - augment.contrast, 1 + augment.contrast, "contrast"),
        saturation=rng.uniform_between(1 - augment.saturation, 1 + augment.saturation, "saturation"),
        hue=rng.uniform_between(-augment.hue, augment.hue, "hue"),
    )


def colour_map(augmentation: AugmentationParams) -> AffineColourMap | None:
    """Brightness, then contrast around mid-grey, then saturation, then hue, as one map; None if it is the identity."""
    if augmentation.brightness == augmentation.contrast == augmentation.saturation == 1 and augmentation.hue == 0:
        return None
    grey = np.tile(LUMA, (3, 1))
    saturation = grey + augmentation.saturation * (np.eye(3) - grey)
    linear = _hue_rotation(augmentation.hue) @ saturation
    offset = linear @ np.full(3, 0.5 * (1 - augmentation.contrast))
    return np.column_stack([linear * (augmentation.contrast * augmentation.brightness), offset])


def apply_colour_map(pixels_CHW: torch.Tensor, affine: AffineColourMap) -> None:
    """Map the colours of a uint8 image or clip (channels first) in place, clamped to 0…255."""
    import torch

    matrix = torch.from_numpy(affine.astype(np.float32))
    flat = pixels_CHW.reshape(3, -1)
    mapped = torch.addmm(matrix[:, 3:] * 255, matrix[:, :3], flat.float())
    pixels_CHW.copy_(mapped.round_().clamp_(0, 255).view(pixels_CHW.shape))


def _hue_rotation(fraction: float) -> NDArray[np.float64]:
    """A rotation around the grey axis, which leaves greys unchanged."""
    if fraction == 0:
        return np.eye(3)
    c, s = cos(2 * pi * fraction), sin(2 * pi * fraction)
    rotation = np.array([[1, 0, 0], [0, c, -s], [0, s, c]])
    rgb_rotation: NDArray[np.float64] = np.linalg.inv(_TO_YIQ) @ rotation @ _TO_YIQ
    return rgb_rotation
