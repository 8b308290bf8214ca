"""Which videos and pictures Wan2.2 takes, and how many tokens they become."""

from __future__ import annotations

from supertuner.core.errors import ModelError
from supertuner.core.types import MediaKind
from supertuner.models.spec import ModelDescription


def unsupported_reason(model: ModelDescription, shape: tuple[int, ...]) -> str | None:
    if len(shape) not in (3, 4) or shape[0] != 3:
        return f"its shape is {shape}, and this model takes pictures and videos of 3 colours"
    frames = shape[1] if len(shape) == 4 else 1
    if MediaKind.IMAGE not in model.media_kinds and frames == 1:
        return "it has one frame, and an image-to-video model learns from what comes after the first"
    temporal_stride = _integer(model, "vae", "scale_factor_temporal", 4)
    if frames % temporal_stride != 1:
        return f"it has {frames} frames, and this model takes 1, {temporal_stride + 1}, {2 * temporal_stride + 1} … ({temporal_stride}·n + 1)"
    multiple = _pixels_per_token(model)
    if shape[-2] % multiple or shape[-1] % multiple:
        return f"it is {shape[-1]}×{shape[-2]}, and both sides must be multiples of {multiple}"
    return None


def token_count(model: ModelDescription, shape: tuple[int, ...]) -> int:
    """Latents are CFHW; a token is a patch of them."""
    _, frames, height, width = shape
    patch_frames, patch_height, patch_width = _patch_size(model)
    return (frames // patch_frames) * (height // patch_height) * (width // patch_width)


def _patch_size(model: ModelDescription) -> tuple[int, int, int]:
    patch = model.configs["transformer"].get("patch_size", (1, 2, 2))
    if not isinstance(patch, list | tuple) or len(patch) != 3:
        raise ModelError(f"{model.source.path}: transformer/config.json: patch_size is {patch!r}, not three numbers")
    return int(patch[0]), int(patch[1]), int(patch[2])


def _pixels_per_token(model: ModelDescription) -> int:
    return _integer(model, "vae", "scale_factor_spatial", 8) * _patch_size(model)[1]


def _integer(model: ModelDescription, component: str, key: str, default: int) -> int:
    value = model.configs[component].get(key)
    if value is None:
        return default
    if not isinstance(value, int):
        raise ModelError(f"{model.source.path}: {component}/config.json: {key} is {value!r}, not a whole number")
    return value
