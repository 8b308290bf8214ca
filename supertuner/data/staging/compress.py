"""Codecs of staged files, and the decision which one a file format gets, from a measured trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from supertuner.core.errors import BrokenMediaError

CompressionSetting = Literal["none", "auto", "lz4", "snappy", "zlib", "zstd"] | None

CODECS = ("lz4", "snappy", "zlib", "zstd")
RAW_CODEC = "raw"
MIN_SAVED_SHARE = 0.05
"""Share of bytes that a codec must save to be chosen by `auto`; less is not worth the cost of decompression."""
_AUTO_CODECS = ("lz4", "zstd")
"""What `auto` tries, fastest decompression first."""


@dataclass(frozen=True, slots=True)
class CodecTrial:
    """Bytes of some files of one format, before and after each codec."""

    format: str
    files: int
    nbytes: int
    compressed_bytes: Mapping[str, int]

    def saved_share(self, codec: str) -> float:
        return 1 - self.compressed_bytes[codec] / self.nbytes if self.nbytes else 0.0


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """The codec for one format, and why."""

    format: str
    codec: str
    reason: str
    is_worthwhile: bool
    """Whether the codec saves at least MIN_SAVED_SHARE."""


def codecs_to_try(setting: CompressionSetting) -> tuple[str, ...]:
    """The codecs that must be tried for this setting."""
    if setting in (None, "none"):
        return ()
    return _AUTO_CODECS if setting == "auto" else (str(setting),)


def choose_codec(setting: CompressionSetting, trial: CodecTrial) -> CodecChoice:
    """Which codec a format gets. A codec named in the configuration is used even if it gains nothing."""
    saved_by_codec = [(codec, trial.saved_share(codec)) for codec in codecs_to_try(setting)]
    trial_text = (
        ", ".join(f"{codec} saves {saved:.1%}" for codec, saved in saved_by_codec) + f" on {trial.files} samples"
    )
    if setting == "auto":
        for codec, saved in saved_by_codec:
            if saved >= MIN_SAVED_SHARE:
                return CodecChoice(trial.format, codec, trial_text, is_worthwhile=True)
        return CodecChoice(
            trial.format, RAW_CODEC, f"{trial_text}, less than {MIN_SAVED_SHARE:.0%}", is_worthwhile=False
        )
    codec, saved = saved_by_codec[0]
    return CodecChoice(trial.format, codec, f"as configured; {trial_text}", is_worthwhile=saved >= MIN_SAVED_SHARE)


def compress(codec: str, content: bytes | memoryview) -> memoryview:
    """Compress `content`. Releases the GIL, so that threads run in parallel."""
    import cramjam

    if codec == "lz4":
        return memoryview(cramjam.lz4.compress_block(content, store_size=False))
    if codec == "snappy":
        return memoryview(cramjam.snappy.compress_raw(content))
    if codec == "zlib":
        return memoryview(cramjam.zlib.compress(content))
    return memoryview(cramjam.zstd.compress(content))


def decompress(codec: str, stored: memoryview, raw_nbytes: int) -> memoryview:
    """Decompress to exactly `raw_nbytes`. The buffer has that size, so a forged payload cannot exceed it."""
    import cramjam

    out = bytearray(raw_nbytes)
    readers: Mapping[str, Callable[[memoryview, bytearray], int]] = {
        "lz4": partial(cramjam.lz4.decompress_block_into, output_len=raw_nbytes),
        "snappy": cramjam.snappy.decompress_raw_into,
        "zlib": cramjam.zlib.decompress_into,
        "zstd": cramjam.zstd.decompress_into,
    }
    try:
        written = readers[codec](stored, out)
    except cramjam.DecompressionError as error:
        raise BrokenMediaError(f"stored {codec} data does not decompress: {error}") from error
    if written != raw_nbytes:
        raise BrokenMediaError(f"stored {codec} data decompresses to {written} bytes, not {raw_nbytes}")
    return memoryview(out).toreadonly()
