"""Which pictures Qwen-Image takes, and how many pixels one of its tokens is; tokens are made as Flux makes them."""

from __future__ import annotations

from supertuner.models.families import image_common as pictures
from supertuner.models.families.flux.shapes import PATCH_SIZE
from supertuner.models.spec import ModelDescription


def unsupported_reason(model: ModelDescription, shape: tuple[int, ...]) -> str | None:
    return pictures.image_unsupported_reason(shape, pixels_per_latent(model) * PATCH_SIZE)


def pixels_per_latent(model: ModelDescription) -> int:
    """Each of the VAE's levels but the last halves the sides; it has an entry for each of those."""
    downsampling = model.configs["vae"].get("temperal_downsample", (False, True, True))
    assert isinstance(downsampling, list | tuple)
    return int(2 ** len(downsampling))


def token_grid(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Frames, rows and columns of tokens that latents of this shape (… H W) are."""
    return 1, shape[-2] // PATCH_SIZE, shape[-1] // PATCH_SIZE
