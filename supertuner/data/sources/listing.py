"""What a source holds, known before any media byte is read: items in key order, and what is left out, with reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol


class Span(NamedTuple):
    """Bytes of a file: all of them, or a member of an archive. The file must still be as it was when listed."""

    path: str
    offset: int
    nbytes: int
    file_bytes: int
    mtime_ns: int


class Item(NamedTuple):
    """One sample. A tuple, because datasets have millions of them."""

    key: str
    name: str
    """What its owner calls it: the path below the folder, or `shard.tar/member`."""
    nbytes: int
    media: Span | int
    """Where its bytes are, or the row of a source that hands them out itself."""
    caption: Span | tuple[str, ...] | None
    """Where its captions are, or what they are; None: it has none."""


class Left(NamedTuple):
    """A file that is not used, and why."""

    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class Listing:
    items: list[Item]
    """In the order of their keys' UTF-8 bytes, as an arena numbers them."""
    left: tuple[Left, ...] = ()
    """Broken already by what the listing saw: counts towards `max_broken_share`."""
    notes: tuple[str, ...] = ()
    """What a user would want to know: files of other kinds, hidden files, rows without a file."""
    captions_from: str = "none"
    """Where captions come from and why, for the run's decisions."""
    caption_syntax: Literal["text", "json"] = "text"
    wants_captions: bool = True
    """Whether a sample without a caption is worth a warning."""

    def key_bytes(self) -> int:
        return len("".join([item.key for item in self.items]).encode())

    def caption_bytes(self) -> int:
        """As far as it is known before captions are read: files as large as they are, texts as long as they are."""
        found = (item.caption for item in self.items)
        return sum(
            caption.nbytes if isinstance(caption, Span) else sum(len(text) for text in caption)
            for caption in found
            if caption
        )


class Source(Protocol):
    def identity(self) -> Iterable[bytes]:
        """Parts that change when, and only when, what would be staged changes. Reads no media."""

    def listing(self) -> Listing: ...

    def payload(self, row: int) -> memoryview:
        """The bytes of an item whose `media` is a row."""


def in_key_order(items: Iterable[Item], limit: int | None) -> tuple[list[Item], list[Left]]:
    """Items sorted by key, the first of each key, at most `limit`; and those that share a key with one before."""
    kept: list[Item] = []
    left: list[Left] = []
    last: Item | None = None
    for item in sorted(items):  # by key, then name: the order of code points, which is that of their UTF-8 bytes
        if last is not None and item.key == last.key:
            left.append(Left(item.name, f"two files of one key: {last.name} is kept; rename one of them"))
            continue
        last = item
        kept.append(item)
    return (kept if limit is None else kept[:limit]), left


def some(count: int, one: str, many: str, why: str) -> list[str]:
    """A note about `count` things, or none if there are none."""
    return [f"{count} {one if count == 1 else many} left out: {why}"] if count else []


def first_names(names: Iterable[str], count: int, show: Callable[[str], str] = repr) -> str:
    """`'a', 'b' and 7 more`."""
    shown = [show(name) for _, name in zip(range(3), names, strict=False)]
    more = f" and {count - len(shown)} more" if count > len(shown) else ""
    return ", ".join(shown) + more
