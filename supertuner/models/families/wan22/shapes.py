"""Which videos and pictures Wan2.2 takes, and how many tokens they become."""

from __future__ import annotations

from supertuner.core.errors import ModelError
from supertuner.core.types import MediaKind
from supertuner.models.spec import Model


def why_not(model: Model, shape: tuple[int, ...]) -> str | None:
    if len(shape) not in (3, 4) or shape[0] != 3:
        return f"its shape is {shape}, and this model takes pictures and videos of 3 colours"
    frames = shape[1] if len(shape) == 4 else 1
    if MediaKind.IMAGE not in model.kinds and frames == 1:
        return "it has one frame, and an image-to-video model learns from what comes after the first"
    every = _integer(model, "vae", "scale_factor_temporal", 4)
    if frames % every != 1:
        return f"it has {frames} frames, and this model takes 1, {every + 1}, {2 * every + 1} … ({every}·n + 1)"
    side = _pixels_per_token(model)
    if shape[-2] % side or shape[-1] % side:
        return f"it is {shape[-1]}×{shape[-2]}, and both sides must be multiples of {side}"
    return None


def tokens(model: Model, shape: tuple[int, ...]) -> int:
    """Latents are CFHW; a token is a patch of them."""
    _, frames, height, width = shape
    deep, high, wide = _patch(model)
    return (frames // deep) * (height // high) * (width // wide)


def _patch(model: Model) -> tuple[int, int, int]:
    patch = model.configs["transformer"].get("patch_size", (1, 2, 2))
    if not isinstance(patch, list | tuple) or len(patch) != 3:
        raise ModelError(f"{model.source.path}: transformer/config.json: patch_size is {patch!r}, not three numbers")
    return int(patch[0]), int(patch[1]), int(patch[2])


def _pixels_per_token(model: Model) -> int:
    return _integer(model, "vae", "scale_factor_spatial", 8) * _patch(model)[1]


def _integer(model: Model, part: str, key: str, default: int) -> int:
    value = model.configs[part].get(key)
    if value is None:
        return default
    if not isinstance(value, int):
        raise ModelError(f"{model.source.path}: {part}/config.json: {key} is {value!r}, not a whole number")
    return value
