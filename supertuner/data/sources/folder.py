"""A folder of media files with captions beside them, in a metadata file, or in their names."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from supertuner.config.settings.data import Captions
from supertuner.core.errors import BrokenMedia, SourceError
from supertuner.core.types import MediaKind
from supertuner.data.sources import captions as caption_rules
from supertuner.data.sources import metadata
from supertuner.data.sources.listing import Item, Left, Listing, Span, first_names, in_key_order, some
from supertuner.data.sources.walk import Tree, walk


class FolderSource:
    """Keys are paths below the folder without their ending. The folder is walked once, when first asked."""

    def __init__(self, root: Path, kind: MediaKind, captions: Captions, limit: int | None) -> None:
        self._root = os.path.realpath(root)
        self._kind = kind
        self._captions = captions
        self._limit = limit

    @cached_property
    def _tree(self) -> Tree:
        return walk(self._root, self._kind, self._captions.extension)

    @cached_property
    def _metadata_file(self) -> Path | None:
        return metadata.find(Path(self._root), self._captions)

    @cached_property
    def _metadata_bytes(self) -> bytes:
        """Read once, so that the fingerprint and the captions cannot disagree."""
        return b"" if self._metadata_file is None else metadata.content(self._metadata_file)

    @cached_property
    def _captions_from(self) -> tuple[caption_rules.From, str]:
        name = None if self._metadata_file is None else self._metadata_file.name
        return caption_rules.choose(self._captions, metadata=name, sidecars=self._sidecars_used())

    def _sidecars_used(self) -> int:
        if not self._tree.sidecars:
            return 0
        return sum(1 for key, name, _, _ in self._tree.media if self._sidecar_of(key, name) is not None)

    @cached_property
    def _listed(self) -> tuple[list[Item], list[Left]]:
        """Items with where their captions are, but without those of a metadata file, which is read only to stage."""
        kept, left = in_key_order(self._items(), self._limit)
        return kept, self._tree.left + left

    def identity(self) -> Iterable[bytes]:
        items, left = self._listed
        yield f"folder {self._captions_from[0]}".encode()
        stamps = [f"{i.name}\0{_stamp(i.media)}\0{i.caption and _stamp(i.caption)}\0" for i in items]
        yield "".join(stamps).encode()  # no name holds a zero, so the parts cannot run into each other
        yield "".join(f"{one.file}\0{one.reason}\0" for one in sorted(left)).encode()
        if self._captions_from[0] == "metadata":
            yield self._metadata_bytes

    def listing(self) -> Listing:
        items, left = self._listed
        source, why = self._captions_from
        notes = self._tree.notes(self._kind) + self._orphans(source)
        if self._metadata_file is not None:
            others = metadata.unread(Path(self._root), self._metadata_file)
            notes += [f"{name} is not read: captions come from {self._metadata_file.name}" for name in others]
        if source == "metadata":
            rows = self._rows()
            items, more_left, more_notes = _with_rows(items, rows, self._limit)
            left, notes = left + more_left, notes + more_notes
        return Listing(items, tuple(left), tuple(notes), f"{source}: {why}", "text", wants_captions=self._wants(source))

    def payload(self, row: int) -> memoryview:
        raise AssertionError("a folder's items are files")

    def _wants(self, source: str) -> bool:
        return source != "none" or self._captions.source == "auto"

    def _items(self) -> Iterator[Item]:
        source = self._captions_from[0]
        root = self._root
        for key, name, nbytes, mtime_ns in self._tree.media:
            caption = None if source == "none" else self._caption(key, name, source)
            yield Item(key, name, nbytes, Span(f"{root}/{name}", 0, nbytes, nbytes, mtime_ns), caption)

    def _caption(self, key: str, name: str, source: caption_rules.From) -> Span | tuple[str, ...] | None:
        if source == "sidecar":
            entry = self._sidecar_of(key, name)
            return None if entry is None else _caption_span(entry)
        if source == "filename":
            return (key.rpartition("/")[2],)
        if source == "constant":
            return (self._captions.constant or "",)
        return None

    def _sidecar_of(self, key: str, name: str) -> os.DirEntry[str] | None:
        """`a.txt` or `a.jpg.txt` for `a.jpg`."""
        sidecars = self._tree.sidecars
        return sidecars.get(key) or sidecars.get(name)

    def _orphans(self, source: str) -> list[str]:
        if source != "sidecar" or self._limit is not None:
            return []
        sidecars, media = self._tree.sidecars, self._tree.media
        orphans = sorted(sidecars.keys() - {owner for key, name, _, _ in media for owner in (key, name)})
        doubled = [name for key, name, _, _ in media if key in sidecars and name in sidecars]
        why = {f"no {self._kind} of that name": orphans, "its file has another, shorter named one": doubled}
        return [note for reason, names in why.items() for note in self._unused(names, reason)]

    def _unused(self, names: list[str], reason: str) -> list[str]:
        shown = first_names((name + self._captions.extension for name in names), len(names))
        return some(len(names), "caption file", "caption files", f"{reason} ({shown})")

    def _rows(self) -> metadata.Rows:
        if self._metadata_file is None:
            raise SourceError(
                f'{self._root}: captions.source is "metadata" and there is no metadata.jsonl, metadata.csv or '
                "metadata.parquet; set captions.metadata_file"
            )
        return metadata.rows(self._metadata_file, self._metadata_bytes, self._captions)


def _caption_span(entry: os.DirEntry[str]) -> Span:
    """Where a caption file is. One that cannot be read is found out, and said, when its sample is staged."""
    try:
        status = entry.stat()
    except OSError:
        return Span(entry.path, 0, 0, -1, 0)  # -1: whatever is read there is not what was listed
    size = status.st_size if stat.S_ISREG(status.st_mode) else -1
    return Span(entry.path, 0, max(size, 0), size, status.st_mtime_ns)


def _stamp(where: Span | tuple[str, ...] | int | None) -> str:
    """What identifies bytes without reading them: size and time of change; for captions given as text, the text."""
    if isinstance(where, Span):
        return f"{where.file_bytes} {where.mtime_ns}"
    return repr(where)


def _with_rows(items: list[Item], rows: metadata.Rows, limit: int | None) -> tuple[list[Item], list[Left], list[str]]:
    """Items with the captions of a metadata file. A row names a listed file or nothing: no path in it is opened."""
    kept: list[Item] = []
    left: list[Left] = []
    used: set[str] = set()
    for item in items:
        name = item.name if item.name in rows.cells else item.key
        cells = rows.cells.get(name)
        if cells is None:
            kept.append(item)
            continue
        used.add(name)
        try:
            kept.append(item._replace(caption=metadata.captions_of(cells)))
        except BrokenMedia as error:
            left.append(Left(item.name, str(error)))
    unknown = [] if limit is not None else sorted(rows.cells.keys() - used)
    notes = some(len(unknown), "metadata row", "metadata rows", f"no such file ({first_names(unknown, len(unknown))})")
    notes += some(rows.outside, "metadata row", "metadata rows", "its path leads out of the dataset's folder")
    return kept, left, notes
