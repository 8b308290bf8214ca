"""Random training windows of all transformer families: widths, depths, shapes and settings.

Optimizers and formats of base weights are those of the settings, so that a new one is drawn without a change here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch

from supertuner.config.settings.model import ModelSettings
from supertuner.config.settings.optim import OptimizerSettings
from supertuner.plan.trace.encoder_shapes import BatchShape, BatchTensorSpec
from tests.phantom.full_size import EDIT, FLUX, QWEN, SD35, SD35_MEDIUM, WAN, WAN_5B, WAN_I2V, Case

HALF = torch.bfloat16
OPTIMIZER_NAMES: tuple[str, ...] = get_args(OptimizerSettings.model_fields["name"].annotation)
BASE_FORMATS: tuple[str, ...] = get_args(ModelSettings.model_fields["base_weights"].annotation)
Drawn = tuple[dict[str, Any], dict[str, BatchTensorSpec], dict[str, BatchTensorSpec], tuple[int, ...]]
"""Config of the denoiser, text, conditions, latents."""


def random_case(seed: int) -> Case:
    """A window determined by the seed."""
    draw = random.Random(seed)
    family, path, make = draw.choice(_FAMILIES)
    denoiser, text, conditions, latents = make(draw)
    samples, precision = draw.choice((1, 1, 2, 3, 4)), draw.choice(("bf16", "bf16", "bf16", "fp16", "fp32"))
    if precision != "bf16":
        dtype = torch.float16 if precision == "fp16" else torch.float32
        text = {
            name: BatchTensorSpec(one.shape, dtype if one.dtype == HALF else one.dtype) for name, one in text.items()
        }
    if samples == 1:
        text.pop("mask", None)
    adapter: Mapping[str, Any] = draw.choice(
        (
            {"type": "full"},
            {"type": "lora", "rank": draw.choice((1, 4, 16, 64, 128))},
            {"type": "lora", "rank": 32, "targets": "all_linear"},
            {"type": "lora", "rank": 8, "dora": True},
            {"type": "lokr", "rank": 8},
        )
    )
    train = {
        "gradient_checkpointing": draw.random() < 0.5,
        "mixed_precision": precision,
        "ema_decay": draw.choice((None, None, 0.99)),
        "max_grad_norm": draw.choice((None, 1.0)),
    }
    optimizer = {"name": draw.choice(OPTIMIZER_NAMES)}
    is_frozen = adapter["type"] != "full" and not adapter.get("dora")
    model = {"base_weights": draw.choice(BASE_FORMATS) if is_frozen else "as_computed"}
    micro_batches = draw.choice((1, 1, 2, 3))
    sizes = f"{micro_batches} × {samples} samples of {latents}"
    parts = [f"seed {seed}", path, str(denoiser), sizes, *map(str, (adapter, train, optimizer, model))]
    return Case(
        title=", ".join(parts),
        family=family,
        path=path,
        media=(),
        samples=samples,
        micro_batches=micro_batches,
        adapter=adapter,
        train=train,
        optimizer=optimizer,
        model=model,
        denoiser=denoiser,
        shape=BatchShape(samples, latents, text, conditions),
    )


def _wan(draw: random.Random, channels: int = 16, condition: int = 0) -> Drawn:
    config = {
        "num_attention_heads": draw.randint(4, 48),
        "attention_head_dim": draw.choice((48, 64, 96, 128)),
        "ffn_dim": 128 * draw.randint(10, 120),
        "num_layers": draw.randint(2, 8),
    }
    latents = (channels, draw.choice((1, 3, 7, 13)), 2 * draw.randint(8, 40), 2 * draw.randint(8, 40))
    conditions = {"condition": BatchTensorSpec((condition, *latents[1:]), HALF)} if condition else {}
    return config, {"embeds": BatchTensorSpec((512, 4096), HALF)}, conditions, latents


def _wan_i2v(draw: random.Random) -> Drawn:
    return _wan(draw, condition=20)


def _wan_5b(draw: random.Random) -> Drawn:
    return _wan(draw, channels=48)


def _rope(width: int) -> list[int]:
    """How a head's dimension is divided among the axes of RoPE."""
    return [width - 2 * (width // 16 * 7), width // 16 * 7, width // 16 * 7]


def _image_latents(draw: random.Random) -> tuple[int, ...]:
    return 16, 2 * draw.randint(16, 72), 2 * draw.randint(16, 72)


def _flux(draw: random.Random) -> Drawn:
    width = draw.choice((32, 64, 128))
    config = {
        "num_attention_heads": draw.randint(4, 32),
        "attention_head_dim": width,
        "axes_dims_rope": _rope(width),
        "num_layers": draw.randint(1, 5),
        "num_single_layers": draw.randint(1, 8),
    }
    text = {
        "embeds": BatchTensorSpec((draw.choice((77, 256, 512)), 4096), HALF),
        "pooled": BatchTensorSpec((768,), HALF),
    }
    return config, text, {}, _image_latents(draw)


def _qwen(draw: random.Random) -> Drawn:
    width = draw.choice((64, 128))
    config = {
        "num_attention_heads": draw.randint(4, 32),
        "attention_head_dim": width,
        "axes_dims_rope": _rope(width),
        "num_layers": draw.randint(2, 8),
    }
    length = draw.randint(20, 900)
    text = {"embeds": BatchTensorSpec((length, 3584), HALF), "mask": BatchTensorSpec((length,), torch.int64)}
    return config, text, {}, _image_latents(draw)


def _edit(draw: random.Random) -> Drawn:
    config, text, _, latents = _qwen(draw)
    return config, text, {"condition": BatchTensorSpec(latents, HALF)}, latents


def _sd35(draw: random.Random) -> Drawn:
    heads, width = draw.randint(4, 40), draw.choice((32, 64, 96))
    layers = draw.randint(2, 8)
    config = {
        "num_attention_heads": heads,
        "attention_head_dim": width,
        "caption_projection_dim": heads * width,
        "num_layers": layers,
        "pos_embed_max_size": draw.choice((96, 192)),
        "dual_attention_layers": list(range(draw.randint(0, layers - 1))),
    }
    text = {"embeds": BatchTensorSpec((draw.choice((154, 333)), 4096), HALF), "pooled": BatchTensorSpec((2048,), HALF)}
    return config, text, {}, _image_latents(draw)


_FAMILIES: tuple[tuple[str, str, Callable[[random.Random], Drawn]], ...] = (
    ("wan2.2", WAN, _wan),
    ("wan2.2", WAN_I2V, _wan_i2v),
    ("wan2.2", WAN_5B, _wan_5b),
    ("qwen-image", QWEN, _qwen),
    ("qwen-image-edit", EDIT, _edit),
    ("flux", FLUX, _flux),
    ("sd3.5", SD35, _sd35),
    ("sd3.5", SD35_MEDIUM, _sd35),
)
