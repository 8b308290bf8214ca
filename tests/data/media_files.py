"""Creates small real media files of every kind in memory, for tests."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

FORMATS = {"jpeg": "JPEG", "png": "PNG", "webp": "WEBP"}


def picture(
    format: str = "jpeg", size: tuple[int, int] = (64, 48), seed: int = 0, orientation: int = 1, **save
) -> bytes:
    """An encoded image of noise, so that every seed gives different bytes."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    if orientation != 1:
        exif = Image.Exif()
        exif[0x010F] = "maker"
        exif[0x0112] = orientation
        save["exif"] = exif
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, FORMATS[format], **save)
    return out.getvalue()


def video(format: str = "mp4", frames: int = 12, size: tuple[int, int] = (64, 48), rotation: int = 0) -> bytes:
    import av

    out = io.BytesIO()
    with av.open(out, "w", format={"mkv": "matroska"}.get(format, format)) as container:
        stream = container.add_stream("libx264", rate=24)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        if rotation:
            stream.set_display_rotation(rotation)
        rng = np.random.default_rng(1)
        for _ in range(frames):
            pixels = rng.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def sound(format: str = "wav", seconds: float = 0.5, rate: int = 16_000, channels: int = 2) -> bytes:
    import soundfile

    wave = np.random.default_rng(2).normal(0, 0.1, (int(seconds * rate), channels)).astype(np.float32)
    out = io.BytesIO()
    soundfile.write(out, wave, rate, format=format.upper())
    return out.getvalue()


def png_claiming(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header claims this size."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def write(folder: Path, files: dict[str, bytes | str]) -> Path:
    """Write files below `folder`, with their subfolders."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def tar(path: Path, members: dict[str, bytes | str], format: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as archive:
        for name, content in members.items():
            content = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path
