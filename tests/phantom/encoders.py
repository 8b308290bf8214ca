"""Compares encoders of full size on the phantom with their forecasts.

VAEs consist of convolutions, and the phantom has its own rule for cuDNN's workspaces: agreement shows that shapes and
lifetimes are right, not cuDNN's bytes.

As a program it prints the encoders' table of docs/forecast.md: scripts/phantom_python.sh -m tests.phantom.encoders
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from supertuner.config.settings.model import ModelSettings
from supertuner.config.settings.run_config import RunConfig
from supertuner.models import loading
from supertuner.models.published_models import describe_model
from supertuner.plan.trace.caching_allocator import simulate_allocator
from supertuner.plan.trace.cuda_kernels import CudaDevice
from supertuner.plan.trace.encoder_shapes import without_weights
from supertuner.plan.trace.inference_phases import trace_media_encoding, trace_text_encoding
from tests.phantom.full_size import FLUX, GIB, QWEN, SD35, SDXL, WAN, WAN_5B, Bytes, placed

CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Encoding:
    title: str
    family: str
    path: str
    media: tuple[int, ...] | None = None
    """CHW or CFHW in pixels; None: captions."""


ENCODINGS = (
    Encoding("Wan2.2 14B: VAE, 81 frames of 832×480", "wan2.2", WAN, (3, 81, 480, 832)),
    Encoding("Wan2.2 5B: VAE, 49 frames of 1280×704", "wan2.2", WAN_5B, (3, 49, 704, 1280)),
    Encoding("Flux: VAE, 1024×1024", "flux", FLUX, (3, 1024, 1024)),
    Encoding("SDXL: VAE, 1024×1024", "sdxl", SDXL, (3, 1024, 1024)),
    Encoding("Qwen-Image: VAE, 1024×1024", "qwen-image", QWEN, (3, 1024, 1024)),
    Encoding("Wan2.2: text", "wan2.2", WAN),
    Encoding("Flux: text", "flux", FLUX),
    Encoding("SD3.5: text", "sd3.5", SD35),
    Encoding("SDXL: text", "sdxl", SDXL),
    Encoding("Qwen-Image: text", "qwen-image", QWEN),
)


def forecast(one: Encoding) -> Bytes:
    family, model, _ = describe_model(ModelSettings(family=one.family, path=one.path))
    config = RunConfig.model_validate({"model": {"family": one.family, "path": one.path}})
    if one.media is not None:
        trace = trace_media_encoding(family, model, one.media, device=CudaDevice())
    else:
        trace = trace_text_encoding(config, family, model, device=CudaDevice())
    peaks = simulate_allocator(trace)
    return Bytes(peaks.allocated_bytes, peaks.reserved_bytes)


def on_the_phantom(one: Encoding) -> Bytes:
    """The peaks of encoding the second of two samples or captions. Measured."""
    family, model, _ = describe_model(ModelSettings(family=one.family, path=one.path))
    with torch.no_grad(), _on_the_gpu():
        encode: Callable[[], object]
        if one.media is not None:
            vae, media = (
                family.build_media_encoder(without_weights(model), CUDA),
                torch.zeros(1, *one.media, dtype=torch.uint8),
            )
            encode = lambda: vae.encode(media)  # noqa: E731
        else:
            encoder = family.build_text_encoder(without_weights(model), CUDA, torch.bfloat16)
            encode = lambda: encoder.encode(["a"])  # noqa: E731
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            encode()
    found = Bytes(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    del encode
    vae = encoder = None
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return found


@contextmanager
def _on_the_gpu() -> Iterator[None]:
    """Inside, modules without weights consist of uninitialized CUDA tensors."""
    original = loading.build_without_weights

    def build_on_gpu(build_module: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
        return placed(CUDA, original(build_module, dtype))

    loading.build_without_weights = build_on_gpu
    try:
        yield
    finally:
        loading.build_without_weights = original


def main() -> None:
    for one in ENCODINGS:
        modelled, measured = forecast(one), on_the_phantom(one)
        parts = [one.title]
        pairs = ((modelled.allocated, measured.allocated), (modelled.reserved, measured.reserved))
        for ours, theirs in pairs:
            parts += [f"{ours / GIB:.2f}", f"{theirs / GIB:.2f}", f"{100 * (ours / theirs - 1):+.2f} %"]
        sys.stdout.write(" | ".join(["", *parts, ""]).strip() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
