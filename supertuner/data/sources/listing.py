"""What a source holds, known before any media byte is read: items in key order, and what is left out, with reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol


class FileSpan(NamedTuple):
    """Bytes of a file: all of them, or a member of an archive. The file must still be as it was when listed."""

    path: str
    offset: int
    nbytes: int
    file_bytes: int
    mtime_ns: int


class SourceItem(NamedTuple):
    """One sample. A tuple, because datasets have millions of them."""

    key: str
    name: str
    """What its owner calls it: the path below the folder, or `shard.tar/member`."""
    nbytes: int
    media: FileSpan | int
    """Where its bytes are, or the row of a source that hands them out itself."""
    caption: FileSpan | tuple[str, ...] | None
    """Where its captions are, or what they are; None: it has none."""


class SkippedFile(NamedTuple):
    """A file that is not used, and why."""

    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class SourceListing:
    items: list[SourceItem]
    """In the order of their keys' UTF-8 bytes, as an arena numbers them."""
    skipped: tuple[SkippedFile, ...] = ()
    """Broken already by what the listing saw: counts towards `max_broken_share`."""
    notes: tuple[str, ...] = ()
    """What a user would want to know: files of other kinds, hidden files, rows without a file."""
    caption_origin: str = "none"
    """Where captions come from and why, for the run's decisions."""
    caption_syntax: Literal["text", "json"] = "text"
    expects_captions: bool = True
    """Whether a sample without a caption is worth a warning."""

    def key_bytes(self) -> int:
        return len("".join([item.key for item in self.items]).encode())

    def caption_bytes(self) -> int:
        """As far as it is known before captions are read: files as large as they are, texts as long as they are."""
        captions = (item.caption for item in self.items)
        return sum(
            caption.nbytes if isinstance(caption, FileSpan) else sum(len(text) for text in caption)
            for caption in captions
            if caption
        )


class DataSource(Protocol):
    def fingerprint_parts(self) -> Iterable[bytes]:
        """Parts that change when, and only when, what would be staged changes. Reads no media."""

    def list_items(self) -> SourceListing: ...

    def read_row(self, row: int) -> memoryview:
        """The bytes of an item whose `media` is a row."""


def sort_and_deduplicate(items: Iterable[SourceItem], limit: int | None) -> tuple[list[SourceItem], list[SkippedFile]]:
    """Items sorted by key, the first of each key, at most `limit`; and those that share a key with one before."""
    kept: list[SourceItem] = []
    duplicates: list[SkippedFile] = []
    last: SourceItem | None = None
    for item in sorted(items):  # by key, then name: the order of code points, which is that of their UTF-8 bytes
        if last is not None and item.key == last.key:
            duplicates.append(SkippedFile(item.name, f"two files of one key: {last.name} is kept; rename one of them"))
            continue
        last = item
        kept.append(item)
    return (kept if limit is None else kept[:limit]), duplicates


def skipped_note(count: int, singular: str, plural: str, reason: str) -> list[str]:
    """A note about `count` things, or none if there are none."""
    return [f"{count} {singular if count == 1 else plural} left out: {reason}"] if count else []


def first_names(names: Iterable[str], count: int, show: Callable[[str], str] = repr) -> str:
    """`'a', 'b' and 7 more`."""
    shown = [show(name) for _, name in zip(range(3), names, strict=False)]
    more = f" and {count - len(shown)} more" if count > len(shown) else ""
    return ", ".join(shown) + more
