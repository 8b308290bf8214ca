"""Which pictures Flux takes, and how their latents become tokens: four neighbours are one."""

from __future__ import annotations

import torch

from supertuner.models.families import image_common as pictures
from supertuner.models.spec import ModelDescription

PATCH_SIZE = 2


def unsupported_reason(model: ModelDescription, shape: tuple[int, ...]) -> str | None:
    return pictures.image_unsupported_reason(shape, pictures.vae_scale_factor(model) * PATCH_SIZE)


def token_count(model: ModelDescription, shape: tuple[int, ...]) -> int:
    """Latents are CHW."""
    _, height, width = shape
    return (height // PATCH_SIZE) * (width // PATCH_SIZE)


def pack_latents(latents_BCHW: torch.Tensor) -> torch.Tensor:
    """One row of 4·C numbers per token."""
    batch, channels, height, width = latents_BCHW.shape
    patches = latents_BCHW.reshape(batch, channels, height // PATCH_SIZE, PATCH_SIZE, width // PATCH_SIZE, PATCH_SIZE)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH_SIZE * PATCH_SIZE)


def unpack_latents(packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of `pack`, for latents of that shape."""
    batch, channels, height, width = shape
    patches = packed.reshape(batch, height // PATCH_SIZE, width // PATCH_SIZE, channels, PATCH_SIZE, PATCH_SIZE)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(shape)


def token_coordinates(shape: torch.Size, device: torch.device) -> torch.Tensor:
    """For each token (0, row, column)."""
    rows, columns = shape[-2] // PATCH_SIZE, shape[-1] // PATCH_SIZE
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    coordinates = torch.stack([torch.zeros_like(row), row, column], dim=-1)
    return coordinates.reshape(-1, 3).to(device, torch.float32)
