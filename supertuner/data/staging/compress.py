"""Codecs of staged files, and the decision which one a file format gets, from a trial on some of its files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from supertuner.core.errors import BrokenMediaError
from supertuner.data.probe.sniff import HEAD_BYTES, sniff
from supertuner.data.sources.listing import DataSource, FileSpan, SourceItem
from supertuner.data.staging.budget import stored_bytes
from supertuner.data.staging.span_reader import read_span

CompressionSetting = Literal["none", "auto", "lz4", "snappy", "zlib", "zstd"] | None

RAW_CODEC = "raw"
MIN_SAVED_SHARE = 0.05
"""Share of bytes that a codec must save to be chosen by `auto`; less is not worth the cost of decompression."""
_AUTO_CODECS = ("lz4", "zstd")
"""What `auto` tries, fastest decompression first."""
_FILES_PER_EXTENSION = 12
"""Files tried per file extension: enough to distinguish 5 % from nothing, few enough to take no time."""
_MAX_BYTES = 64 << 20
"""Larger files are not tried, unless there are no others."""


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
    saved_by_codec = {codec: trial.saved_share(codec) for codec in codecs_to_try(setting)}
    worthwhile = [codec for codec, saved in saved_by_codec.items() if saved >= MIN_SAVED_SHARE]
    savings = ", ".join(f"{codec} saves {saved:.1%}" for codec, saved in saved_by_codec.items())
    reason = f"{savings} on {trial.files} samples"
    if setting != "auto":
        return CodecChoice(trial.format, str(setting), f"as configured; {reason}", bool(worthwhile))
    if worthwhile:
        return CodecChoice(trial.format, worthwhile[0], reason, True)
    return CodecChoice(trial.format, RAW_CODEC, f"{reason}, less than {MIN_SAVED_SHARE:.0%}", False)


def choose_codecs(
    setting: CompressionSetting, items: Sequence[SourceItem], source: DataSource
) -> dict[str, CodecChoice]:
    """The codec for each file format in the trial; empty if the setting disables compression."""
    codecs = codecs_to_try(setting)
    if not codecs:
        return {}
    contents: dict[str, list[memoryview]] = defaultdict(list)
    for item in pick_trial_items(items):
        try:
            content = read_span(item.media) if isinstance(item.media, FileSpan) else source.read_row(item.media)
        except BrokenMediaError:
            continue  # staging sets it aside with the reason
        contents[sniff(bytes(content[:HEAD_BYTES])) or "unknown"].append(content)
    trials = [_run_trial(format, samples, codecs) for format, samples in sorted(contents.items())]
    return {trial.format: choose_codec(setting, trial) for trial in trials}


def pick_trial_items(items: Sequence[SourceItem]) -> list[SourceItem]:
    """Up to _FILES_PER_EXTENSION items of each extension, evenly spread over the listing, small enough to try."""
    groups: dict[str, list[SourceItem]] = defaultdict(list)
    for item in items:
        groups[item.name.rpartition(".")[2].lower()].append(item)
    picked: list[SourceItem] = []
    for group in groups.values():
        usable = [item for item in group if item.nbytes <= _MAX_BYTES] or [min(group, key=lambda i: i.nbytes)]
        step = max(1, len(usable) // _FILES_PER_EXTENSION)
        picked += usable[::step][:_FILES_PER_EXTENSION]
    return picked


def _run_trial(format: str, contents: list[memoryview], codecs: tuple[str, ...]) -> CodecTrial:
    """Sizes count in whole pages, because bytes saved inside the last page of a file save no memory."""
    compressed = {codec: sum(stored_bytes(len(compress(codec, item))) for item in contents) for codec in codecs}
    return CodecTrial(format, len(contents), sum(stored_bytes(len(item)) for item in contents), compressed)


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
