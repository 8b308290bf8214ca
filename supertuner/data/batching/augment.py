"""Which part of a sample is used and how it is changed: decided by pure functions of settings and chance, then applied.

All changes of colour are one affine map of RGB, so a pixel is rounded once whatever is combined, and every frame of a
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
"""3 × 4: out = matrix[:, :3] @ rgb + matrix[:, 3], with colours from 0 to 1."""

LUMA = np.array([0.299, 0.587, 0.114])
"""Weights of grey in ITU-R BT.601, which JPEG uses."""

_TO_YIQ = np.array([LUMA, [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
"""The NTSC colour space, in which hue is an angle around the axis of grey."""


@dataclass(frozen=True, slots=True)
class AugmentationParams:
    """What happens to a sample in one turn."""

    flip: bool = False
    crop_x: float = 0.5
    """Where the crop lies in what can be cut off: 0 left, 1 right."""
    crop_y: float = 0.5
    """0 top, 1 bottom."""
    crop_time: float = 0.5
    """Where the cut lies in time: 0 at the beginning, 1 at the end."""
    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0
    hue: float = 0.0
    """In turns of the colour circle."""


def draw_augmentation(augment: AugmentSettings, random_crop: bool, rng: SampleRng) -> AugmentationParams:
    """The change that the settings and chance decide on. A random crop moves the cut in time too."""
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
    """Brightness, then contrast around middle grey, then saturation, then hue, as one map; None if nothing changes."""
    if (augmentation.brightness, augmentation.contrast, augmentation.saturation, augmentation.hue) == (
        1.0,
        1.0,
        1.0,
        0.0,
    ):
        return None
    grey = np.tile(LUMA, (3, 1))
    saturation = grey + augmentation.saturation * (np.eye(3) - grey)
    linear = _hue_rotation(augmentation.hue) @ saturation
    offset = linear @ np.full(3, 0.5 * (1 - augmentation.contrast))
    return np.column_stack([linear * (augmentation.contrast * augmentation.brightness), offset])


def apply_colour_map(pixels_CHW: torch.Tensor, affine: AffineColourMap) -> None:
    """Map the colours of a uint8 picture or clip (C first) in place; results beyond black and white are cut off."""
    import torch

    matrix = torch.from_numpy(affine.astype(np.float32))
    flat = pixels_CHW.reshape(3, -1)
    mapped = torch.addmm(matrix[:, 3:] * 255, matrix[:, :3], flat.float())
    pixels_CHW.copy_(mapped.round_().clamp_(0, 255).view(pixels_CHW.shape))


def _hue_rotation(turns: float) -> NDArray[np.float64]:
    """A rotation around the axis of grey: greys stay as they are."""
    if turns == 0:
        return np.eye(3)
    c, s = cos(2 * pi * turns), sin(2 * pi * turns)
    rotation = np.array([[1, 0, 0], [0, c, -s], [0, s, c]])
    rgb_rotation: NDArray[np.float64] = np.linalg.inv(_TO_YIQ) @ rotation @ _TO_YIQ
    return rgb_rotation
