"""SourceListing: the items of a source in key order and the skipped files with reasons, before any media are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol


class FileSpan(NamedTuple):
    """A range of a file's bytes: the whole file, or a member of an archive. Size and time detect later changes."""

    path: str
    offset: int
    nbytes: int
    file_bytes: int
    mtime_ns: int


class SourceItem(NamedTuple):
    """One sample. A tuple, because datasets have millions of them."""

    key: str
    name: str
    """The name shown to users: the path below the folder, or `shard.tar/member`."""
    nbytes: int
    media: FileSpan | int
    """Where its bytes are, or the row number for `DataSource.read_row`."""
    caption: FileSpan | tuple[str, ...] | None
    """Where its captions are, or the captions themselves; None if it has none."""


class SkippedFile(NamedTuple):
    """A file that is not used, and the reason.

    Reasons found while a folder is listed are part of its fingerprint: changing their wording would stage it again.
    """

    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class SourceListing:
    items: list[SourceItem]
    """Sorted by the UTF-8 bytes of their keys, which is the order in the arena."""
    skipped: tuple[SkippedFile, ...] = ()
    """Files found to be broken while listing; they count towards `max_broken_share`."""
    notes: tuple[str, ...] = ()
    """Warnings for the user: files of other kinds, hidden files, metadata rows without a file."""
    caption_origin: str = "none"
    """The caption source and the reason, for the run's decisions."""
    caption_syntax: Literal["text", "json"] = "text"

    def key_bytes(self) -> int:
        return len("".join([item.key for item in self.items]).encode())

    def caption_bytes(self) -> int:
        """Estimate before captions are read: the sizes of caption files and the lengths of texts."""
        captions = (item.caption for item in self.items)
        return sum(
            caption.nbytes if isinstance(caption, FileSpan) else sum(len(text) for text in caption)
            for caption in captions
            if caption
        )


class DataSource(Protocol):
    def fingerprint_parts(self) -> Iterable[bytes]:
        """Bytes that change if and only if what would be staged changes. Reads no media."""

    def list_items(self) -> SourceListing: ...

    def read_row(self, row: int) -> memoryview:
        """The bytes of an item whose `media` is a row number."""


def sort_and_deduplicate(items: Iterable[SourceItem], limit: int | None) -> tuple[list[SourceItem], list[SkippedFile]]:
    """Items sorted by key, at most `limit` and only the first of each key; and the others of each key as skipped."""
    kept: list[SourceItem] = []
    duplicates: list[SkippedFile] = []
    last: SourceItem | None = None
    for item in sorted(items):  # by key, then name; the order of code points is the order of UTF-8 bytes
        if last is not None and item.key == last.key:
            duplicates.append(SkippedFile(item.name, f"two files of one key: {last.name} is kept; rename one of them"))
            continue
        last = item
        kept.append(item)
    return (kept if limit is None else kept[:limit]), duplicates


def skipped_note(count: int, singular: str, plural: str, reason: str) -> list[str]:
    """A list with one note about `count` skipped things; empty if `count` is 0."""
    return [f"{count} {singular if count == 1 else plural} skipped: {reason}"] if count else []


def first_names(names: Iterable[str], count: int, show: Callable[[str], str] = repr) -> str:
    """`'a', 'b' and 7 more`."""
    shown = [show(name) for _, name in zip(range(3), names, strict=False)]
    more = f" and {count - len(shown)} more" if count > len(shown) else ""
    return ", ".join(shown) + more
