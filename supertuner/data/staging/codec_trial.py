"""Samples of a dataset's files, read and compressed to see what each real format gains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from supertuner.core.errors import BrokenMedia
from supertuner.data.probe.sniff import HEAD_BYTES, sniff
from supertuner.data.sources.listing import Item, Source, Span
from supertuner.data.staging.budget import stored_bytes
from supertuner.data.staging.compress import Choice, Setting, Trial, choose, compress, tried_codecs
from supertuner.data.staging.reading import read_span

_SAMPLES = 12
"""Files looked at per file name ending: enough to tell 5 % from nothing, few enough to take no time."""
_MAX_BYTES = 64 << 20
"""Larger files are left out of the trial, unless there are no others."""


def choices(setting: Setting, items: Sequence[Item], source: Source) -> dict[str, Choice]:
    """The codec for each format found among samples; empty if nothing is to be compressed."""
    codecs = tried_codecs(setting)
    if not codecs:
        return {}
    contents: dict[str, list[memoryview]] = defaultdict(list)
    for item in spread(items):
        try:
            content = item_bytes(item, source)
        except BrokenMedia:
            continue  # staging itself will set it aside, with the reason
        contents[sniff(bytes(content[:HEAD_BYTES])) or "unknown"].append(content)
    return {format: choose(setting, _trial(format, found, codecs)) for format, found in sorted(contents.items())}


def item_bytes(item: Item, source: Source) -> memoryview:
    """An item's bytes, wherever they are."""
    return read_span(item.media) if isinstance(item.media, Span) else source.payload(item.media)


def spread(items: Sequence[Item]) -> list[Item]:
    """Up to `_SAMPLES` items of each ending, evenly over the listing, small enough to try."""
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        groups[item.name.rpartition(".")[2].lower()].append(item)
    picked: list[Item] = []
    for group in groups.values():
        usable = [item for item in group if item.nbytes <= _MAX_BYTES] or [min(group, key=lambda i: i.nbytes)]
        step = max(1, len(usable) // _SAMPLES)
        picked += usable[::step][:_SAMPLES]
    return picked


def _trial(format: str, contents: list[memoryview], codecs: tuple[str, ...]) -> Trial:
    """Sizes are counted in pages: what is saved inside the last page of a file is not saved."""
    after = {codec: sum(stored_bytes(len(compress(codec, content))) for content in contents) for codec in codecs}
    return Trial(format, len(contents), sum(stored_bytes(len(content)) for content in contents), after)
