"""Compresses some of a dataset's files with each codec to measure how much each file format gains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from supertuner.core.errors import BrokenMediaError
from supertuner.data.probe.sniff import HEAD_BYTES, sniff
from supertuner.data.sources.listing import DataSource, FileSpan, SourceItem
from supertuner.data.staging.budget import stored_bytes
from supertuner.data.staging.compress import (
    CodecChoice,
    CodecTrial,
    CompressionSetting,
    choose_codec,
    codecs_to_try,
    compress,
)
from supertuner.data.staging.span_reader import read_span

_FILES_PER_EXTENSION = 12
"""Files tried per file extension: enough to distinguish 5 % from nothing, few enough to take no time."""
_MAX_BYTES = 64 << 20
"""Larger files are not tried, unless there are no others."""


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
            content = read_item(item, source)
        except BrokenMediaError:
            continue  # staging sets it aside with the reason
        contents[sniff(bytes(content[:HEAD_BYTES])) or "unknown"].append(content)
    return {
        format: choose_codec(setting, _run_trial(format, format_contents, codecs))
        for format, format_contents in sorted(contents.items())
    }


def read_item(item: SourceItem, source: DataSource) -> memoryview:
    """An item's bytes, from its file or from its row in the source."""
    return read_span(item.media) if isinstance(item.media, FileSpan) else source.read_row(item.media)


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
    compressed_bytes = {
        codec: sum(stored_bytes(len(compress(codec, content))) for content in contents) for codec in codecs
    }
    return CodecTrial(format, len(contents), sum(stored_bytes(len(content)) for content in contents), compressed_bytes)
