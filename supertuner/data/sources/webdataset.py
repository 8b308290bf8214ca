"""WebDatasetSource: .tar shards whose members with equal names up to the first dot are one sample. Never unpickles."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal

from supertuner.config.settings.data import CaptionSettings
from supertuner.core.errors import SourceError
from supertuner.core.types import MediaKind
from supertuner.data.probe.sniff import KIND_BY_EXTENSION
from supertuner.data.sources import listing
from supertuner.data.sources.caption_parsing import fixed_caption
from supertuner.data.sources.listing import FileSpan, SkippedFile, SourceItem, SourceListing
from supertuner.data.sources.tar_index import iter_tar_members
from supertuner.data.sources.walk import printable_name


class WebDatasetSource:
    """A sample's key is `shard/sample` without extension. Captions are `.txt` members or a field of `.json` members."""

    def __init__(self, root: Path, kind: MediaKind, captions: CaptionSettings, limit: int | None) -> None:
        self._root = Path(os.path.realpath(root))
        self._kind, self._captions, self._limit = kind, captions, limit

    @cached_property
    def _shards(self) -> list[tuple[str, str, os.stat_result]]:
        """Name, path and status of each shard, in name order."""
        paths = [self._root] if self._root.is_file() else sorted(self._root.rglob("*.tar"))
        base = self._root.parent if self._root.is_file() else self._root
        try:
            return [(path.relative_to(base).as_posix(), str(path), path.stat()) for path in paths if path.is_file()]
        except OSError as error:
            raise SourceError(f"{error.filename or self._root}: cannot be examined: {error.strerror}") from error

    def fingerprint_parts(self) -> Iterable[bytes]:
        yield b"webdataset"
        for name, _, status in self._shards:
            yield f"{printable_name(name)}\0{status.st_size}\0{status.st_mtime_ns}".encode()

    def list_items(self) -> SourceListing:
        contents = _ShardContents(self._kind, self._captions)
        items: list[SourceItem] = []
        for name, path, status in self._shards:
            items += contents.scan_shard(name, path, status)
            if self._limit is not None and len(items) >= self._limit:
                break
        syntax, caption_origin = self._caption_syntax(contents.extension_counts)
        with_captions = (contents.with_caption(item, syntax) for item in items)
        kept, duplicates = listing.sort_and_deduplicate(with_captions, self._limit)
        skipped, notes = (*contents.skipped, *duplicates), tuple(contents.notes())
        return SourceListing(kept, skipped, notes, caption_origin, syntax)

    def read_row(self, row: int) -> memoryview:
        raise AssertionError("items of a shard are file spans, not rows")

    def _caption_syntax(self, extension_counts: Counter[str]) -> tuple[Literal["text", "json"], str]:
        """Text members if there are any, else JSON members."""
        captions = self._captions
        if captions.metadata_file is not None:
            remedy = "remove the setting, or set captions.caption_column to the field of the .json members"
            raise SourceError(f"captions.metadata_file: a WebDataset has its captions in its shards; {remedy}")
        if captions.source == "metadata" or (captions.source == "auto" and not extension_counts[captions.extension]):
            return "json", f"metadata: field {captions.caption_column!r} of {extension_counts['.json']} .json members"
        return "text", f"{captions.source}: {extension_counts[captions.extension]} {captions.extension} members"


class _ShardContents:
    """The items and captions of the shards, collected member by member."""

    def __init__(self, kind: MediaKind, captions: CaptionSettings) -> None:
        self._kind, self._captions = kind, captions
        self._caption_spans: dict[tuple[str, str], FileSpan] = {}
        self.skipped: list[SkippedFile] = []
        self.extension_counts: Counter[str] = Counter()

    def scan_shard(self, name: str, path: str, status: os.stat_result) -> list[SourceItem]:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.skipped.append(SkippedFile(name, f"unreadable: {error.strerror}"))
            return []
        try:
            return list(self._items(name, path, status, fd))
        except OSError as error:  # a failing disk, not a damaged archive: its contents are unknown
            raise SourceError(f"{path}: cannot be read: {error.strerror}; check its disk") from error
        finally:
            os.close(fd)

    def _items(self, shard: str, path: str, status: os.stat_result, fd: int) -> Iterator[SourceItem]:
        stem = shard.removesuffix(".tar")
        for member in iter_tar_members(fd):
            name = printable_name(f"{shard}/{member.name}" if member.name else shard)
            folder, _, base = member.name.rpartition("/")
            if base.startswith(".") and not member.problem:
                continue
            key, ending = _split_key(f"{stem}/{folder}/" if folder else f"{stem}/", base)
            is_media = KIND_BY_EXTENSION.get(_last_extension(ending)) is self._kind
            self.extension_counts[ending] += 1
            if member.problem or (is_media and not member.nbytes):
                self.skipped.append(SkippedFile(name, member.problem or "zero bytes"))
                continue
            span = FileSpan(path, member.offset, member.nbytes, status.st_size, status.st_mtime_ns)
            if is_media:
                yield SourceItem(key, name, member.nbytes, span, None)
            elif ending in (self._captions.extension, ".json"):
                self._caption_spans[key, ending] = span

    def with_caption(self, item: SourceItem, syntax: str) -> SourceItem:
        caption: FileSpan | tuple[str, ...] | None = fixed_caption(self._captions, item.key)
        if caption is None and self._captions.source != "none":
            caption = self._caption_spans.get((item.key, ".json" if syntax == "json" else self._captions.extension))
        return item._replace(caption=caption)

    def notes(self) -> list[str]:
        lines: list[str] = []
        for ending, count in sorted(self.extension_counts.items()):
            kind = KIND_BY_EXTENSION.get(_last_extension(ending))
            if kind is not None and kind is not self._kind:
                lines += listing.skipped_note(count, f"{kind} member", f"dataset_type is {self._kind}")
            elif kind is None and ending not in ("", ".json", self._captions.extension):
                lines += listing.skipped_note(count, f"{ending} member", "neither media nor captions")
        return lines


def _split_key(prefix: str, base: str) -> tuple[str, str]:
    """WebDataset's rule: the key ends at the first dot of the last path component; extensions are case-insensitive."""
    stem, dot, ending = base.partition(".")
    return prefix + stem, (dot + ending).lower()


def _last_extension(ending: str) -> str:
    """`.jpg` of `.left.jpg`."""
    return "." + ending.rpartition(".")[2] if ending else ""
