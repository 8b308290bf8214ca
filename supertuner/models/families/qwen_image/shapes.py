"""Which pictures Qwen-Image takes, and how many pixels one of its tokens is; tokens are made as Flux makes them."""

from __future__ import annotations

from supertuner.models.families import image_common as pictures
from supertuner.models.families.flux.shapes import PATCH
from supertuner.models.spec import Model


def why_not(model: Model, shape: tuple[int, ...]) -> str | None:
    return pictures.why_not(shape, pixels_per_latent(model) * PATCH)


def pixels_per_latent(model: Model) -> int:
    """Each of the VAE's levels but the last halves the sides; it has an entry for each of those."""
    halved = model.configs["vae"].get("temperal_downsample", (False, True, True))
    assert isinstance(halved, list | tuple)
    return int(2 ** len(halved))


def grid(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Frames, rows and columns of tokens that latents of this shape (… H W) are."""
    return 1, shape[-2] // PATCH, shape[-1] // PATCH
