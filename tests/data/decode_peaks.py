"""A program that measures the memory of decoding: `python -m tests.data.decode_peaks MODE FOLDER` prints JSON.

It runs in its own process, with MALLOC_MMAP_THRESHOLD_ set, so that freed blocks leave the resident memory at once.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from supertuner.arena.home import ArenaHome
from supertuner.arena.run_context import RunContext
from supertuner.config.settings.data import DatasetSettings
from supertuner.core.events import NullSink
from supertuner.core.types import GIB, MIB
from supertuner.data.batching.decoder_pool import DecoderPool
from supertuner.data.corpus import build_corpus
from supertuner.data.decode.decode_memory import RENDERED_BYTES_PER_PIXEL, VIDEO_BYTES_PER_PIXEL
from supertuner.data.decode.image import EncodedImage
from supertuner.data.decode.resize import crop_and_resize, crop_box
from supertuner.data.decode.video import decode_video
from supertuner.data.ordering.micro_batches import single_micro_batch
from supertuner.data.staging.stager import DatasetStager
from tests.data.staging import machine
from tests.data.test_decode_image import linear_light_profile

THREADS, FILES = 6, 6
LIMIT_BYTES = 256 * MIB
"""The bound of decoding in the modes `batches` and `staging`. One file of `write_deep_images` takes half of it."""
DEEP_SIZE = (2400, 1800)
TARGET = (256, 256)


def memory_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def peak_of(work: Callable[[], object]) -> int:
    """By how many bytes the resident memory grew at most during `work`."""
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak of the resident memory
    before = memory_bytes("VmRSS")
    work()
    return memory_bytes("VmHWM") - before


def peak_in_child(work: Callable[[], object]) -> int:
    """`peak_of` in a forked process. `work` was done once before, so that imports do not count, and its freed memory
    was returned to the kernel."""
    work()
    ctypes.CDLL(None).malloc_trim(0)
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, str(peak_of(work)).encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    with os.fdopen(reader) as answer:
        return int(answer.read())


def images() -> Iterator[tuple[str, bytes]]:
    smooth = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    rgb = Image.fromarray(smooth).resize((1800, 1200), Image.Resampling.BILINEAR)
    rgba = Image.merge("RGBA", (*rgb.split(), rgb.getchannel("R")))
    deep = Image.fromarray(np.asarray(rgb)[:, :, 0].astype(np.uint16) * 257)
    turned = Image.Exif()
    turned[0x0112] = 6
    profile = linear_light_profile()

    def encode(image: Image.Image, format: str, **save) -> bytes:
        out = io.BytesIO()
        image.save(out, format, **save)
        return out.getvalue()

    yield "baseline JPEG", encode(rgb, "JPEG", subsampling=0)
    yield "turned JPEG", encode(rgb, "JPEG", exif=turned)
    yield "progressive JPEG", encode(rgb, "JPEG", subsampling=0, progressive=True, exif=turned)
    yield "CMYK JPEG", encode(rgb.convert("CMYK"), "JPEG", subsampling=0, progressive=True, exif=turned)
    yield "JPEG with a profile", encode(rgb, "JPEG", subsampling=0, progressive=True, exif=turned, icc_profile=profile)
    yield "PNG", encode(rgb, "PNG", compress_level=1, exif=turned)
    yield "grey PNG with a profile", encode(rgb.convert("L"), "PNG", compress_level=1, icc_profile=profile)
    yield "transparent PNG", encode(rgba, "PNG", compress_level=1, icc_profile=profile, exif=turned)
    yield "palette PNG", encode(rgb.quantize(16), "PNG", compress_level=1, transparency=0, icc_profile=profile)
    yield "deep grey PNG", encode(deep, "PNG", compress_level=1, exif=turned)
    yield "WebP", encode(rgb, "WEBP", quality=50, method=0, exif=turned, icc_profile=profile)
    yield "transparent WebP", encode(rgba, "WEBP", lossless=True, quality=0, method=0, exif=turned, icc_profile=profile)


def decode_and_resize(content: bytes, target: tuple[int, int] | None) -> None:
    pixels = EncodedImage.open(memoryview(content)).decode(target)
    if target is not None:
        box = crop_box(pixels.shape[1], pixels.shape[0], *target, 0.5, 0.5)
        crop_and_resize(pixels, box, *target, "lanczos")


def measure_estimates(_: Path) -> dict[str, tuple[int, int]]:
    """Name → peak bytes of decoding and resizing, and the estimate."""
    figures = {}
    for name, content in images():
        for target in (None, TARGET) if "JPEG" in name else (TARGET,):
            estimate = EncodedImage.open(memoryview(content)).peak_bytes(target)
            estimate += 0 if target is None else RENDERED_BYTES_PER_PIXEL * TARGET[0] * TARGET[1]
            figures[f"{name} to {target}"] = (
                peak_in_child(lambda content=content, target=target: decode_and_resize(content, target)),
                estimate,
            )
    width, height = 1280, 720
    content = clip(width, height)
    peak = peak_in_child(lambda: [frame.sum() for frame in decode_video(content, 0, 30, None)])
    return figures | {"clip": (peak, VIDEO_BYTES_PER_PIXEL * width * height)}


def clip(width: int, height: int) -> memoryview:
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=24, options={"refs": "16", "bf": "8", "preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p10le"
        for number in range(30):
            pixels = np.full((height, width, 3), number * 8, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return memoryview(out.getvalue())


def write_deep_images(folder: Path) -> DatasetSettings:
    """16-bit grey PNG files, of which each takes about 100 MiB while it is decoded, and is staged by its own thread,
    because it is large."""
    (folder / "images").mkdir()
    rows = np.arange(DEEP_SIZE[1], dtype=np.uint16)[:, None] * np.ones((1, DEEP_SIZE[0]), np.uint16)
    for number in range(FILES):
        Image.fromarray(rows + np.uint16(number)).save(folder / "images" / f"{number}.png", compress_level=0)
    return DatasetSettings(id="deep", instance_data_dir=folder / "images", resolution=256, check="decode")


def measure_batches(folder: Path) -> dict[str, int]:
    settings = write_deep_images(folder).model_copy(update={"check": "structure"})
    _, staged = DatasetStager(ArenaHome(folder / "home"), RunContext.silent(folder)).open(settings)
    corpus = build_corpus([(settings, staged)], seed=0, batch_size=FILES)
    order = corpus.order
    with staged, DecoderPool(corpus, THREADS, LIMIT_BYTES) as decoders:
        batch = single_micro_batch(order, next(order.batches(0, order.epoch_length(0))))
        torch.zeros(1)
        peak = peak_of(lambda: decoders.decode(batch))
    return {"peak": peak, "limit": LIMIT_BYTES}


def measure_staging(folder: Path) -> dict[str, int]:
    """Staging with `check: "decode"` on a machine whose available memory makes the bound LIMIT_BYTES."""
    settings = write_deep_images(folder)
    host = machine(folder / "machine", total=64 * GIB, available=4 * LIMIT_BYTES, tmpfs=folder / "nowhere")
    sink = NullSink()
    stager = DatasetStager(ArenaHome(folder / "home"), RunContext(folder, sink, sink, host))
    in_memory = settings.in_memory.model_copy(update={"num_workers": THREADS})
    split = settings.model_copy(update={"in_memory": in_memory})
    return {"peak": peak_of(lambda: stager.stage(split)), "limit": LIMIT_BYTES}


MODES = {"estimates": measure_estimates, "batches": measure_batches, "staging": measure_staging}

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(MODES[sys.argv[1]](Path(sys.argv[2]))))
