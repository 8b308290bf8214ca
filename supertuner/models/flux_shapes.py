"""Which pictures Flux takes, and how their latents become tokens: four neighbours are one."""

from __future__ import annotations

import torch

from supertuner.models.spec import Model

PATCH = 2


def why_not(model: Model, shape: tuple[int, ...]) -> str | None:
    if len(shape) != 3 or shape[0] != 3:
        return f"its shape is {shape}, and this model takes pictures of 3 colours"
    side = _scale(model) * PATCH
    if shape[1] % side or shape[2] % side:
        return f"it is {shape[2]}×{shape[1]}, and both sides must be multiples of {side}"
    return None


def tokens(model: Model, shape: tuple[int, ...]) -> int:
    """Latents are CHW."""
    _, height, width = shape
    return (height // PATCH) * (width // PATCH)


def pack(latents_BCHW: torch.Tensor) -> torch.Tensor:
    """One row of 4·C numbers per token."""
    batch, channels, height, width = latents_BCHW.shape
    patches = latents_BCHW.reshape(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH * PATCH)


def unpack(packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of `pack`, for latents of that shape."""
    batch, channels, height, width = shape
    patches = packed.reshape(batch, height // PATCH, width // PATCH, channels, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(shape)


def positions(shape: torch.Size, device: torch.device) -> torch.Tensor:
    """For each token (0, row, column)."""
    rows, columns = shape[-2] // PATCH, shape[-1] // PATCH
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    places = torch.stack([torch.zeros_like(row), row, column], dim=-1)
    return places.reshape(-1, 3).to(device, torch.float32)


def _scale(model: Model) -> int:
    """Pixels per latent: each of the VAE's levels but the last halves the sides."""
    widths = model.configs["vae"].get("block_out_channels", (0, 0, 0, 0))
    assert isinstance(widths, list | tuple)
    return int(2 ** (len(widths) - 1))
