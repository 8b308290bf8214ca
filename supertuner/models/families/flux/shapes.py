"""Which pictures Flux takes, and how their latents become tokens: four neighbours are one."""

from __future__ import annotations

import torch

from supertuner.models.families import image_common as pictures
from supertuner.models.spec import Model

PATCH = 2


def why_not(model: Model, shape: tuple[int, ...]) -> str | None:
    return pictures.why_not(shape, pictures.scale(model) * PATCH)


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
