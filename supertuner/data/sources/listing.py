"""SourceListing: the items of a source in key order and the skipped files with reasons, before any media are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        captions = [item.caption for item in self.items if item.caption]
        return sum(c.nbytes if isinstance(c, FileSpan) else sum(map(len, c)) for c in captions)


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
    for item in sorted(items):  # by key, then name; the order of code points is the order of UTF-8 bytes
        if kept and item.key == kept[-1].key:
            reason = f"two files of one key: {kept[-1].name} is kept; rename one of them"
            duplicates.append(SkippedFile(item.name, reason))
        else:
            kept.append(item)
    return (kept if limit is None else kept[:limit]), duplicates


def skipped_note(count: int, noun: str, reason: str) -> list[str]:
    """A list with one note about `count` skipped things; empty if `count` is 0."""
    return [f"{count} {noun}{'' if count == 1 else 's'} skipped: {reason}"] if count else []


def first_names(names: Sequence[str]) -> str:
    """`'a', 'b', 'c' and 7 more`."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
