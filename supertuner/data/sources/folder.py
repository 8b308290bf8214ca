"""FolderSource: a folder of media files, with captions in caption files, in a metadata file, or in file names."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from supertuner.config.settings.data import CaptionSettings
from supertuner.core.errors import BrokenMediaError, SourceError
from supertuner.core.types import MediaKind
from supertuner.data.sources import caption_parsing, listing, metadata
from supertuner.data.sources.listing import FileSpan, SkippedFile, SourceItem, SourceListing
from supertuner.data.sources.walk import FolderTree, walk_folder


class FolderSource:
    """A sample's key is its path below the folder without the extension. The folder is walked once, on first use."""

    def __init__(self, root: Path, kind: MediaKind, captions: CaptionSettings, limit: int | None) -> None:
        self._root = os.path.realpath(root)
        self._kind, self._captions, self._limit = kind, captions, limit

    @cached_property
    def _tree(self) -> FolderTree:
        return walk_folder(self._root, self._kind, self._captions.extension)

    @cached_property
    def _metadata_file(self) -> Path | None:
        return metadata.find_metadata_file(Path(self._root), self._captions)

    @cached_property
    def _metadata_bytes(self) -> bytes:
        """Read once, so that fingerprint and captions come from the same bytes."""
        return b"" if self._metadata_file is None else metadata.read_metadata_file(self._metadata_file)

    @cached_property
    def _caption_source(self) -> tuple[caption_parsing.CaptionSource, str]:
        name = None if self._metadata_file is None else self._metadata_file.name
        media = self._tree.media if self._tree.sidecars else []
        used_sidecars = sum(1 for key, name, _, _ in media if self._find_sidecar(key, name) is not None)
        return caption_parsing.choose_caption_source(self._captions, name, used_sidecars)

    @cached_property
    def _listed_items(self) -> tuple[list[SourceItem], list[SkippedFile]]:
        """Items with the locations of their captions. A metadata file is read only for staging."""
        items, duplicates = listing.sort_and_deduplicate(self._items(), self._limit)
        return items, self._tree.skipped + duplicates

    def fingerprint_parts(self) -> Iterable[bytes]:
        items, skipped = self._listed_items
        yield f"folder {self._caption_source[0]}".encode()
        stamps = [f"{i.name}\0{_change_stamp(i.media)}\0{i.caption and _change_stamp(i.caption)}\0" for i in items]
        yield "".join(stamps).encode()  # names contain no NUL, so the encoding is unambiguous
        yield "".join(f"{file.file}\0{file.reason}\0" for file in sorted(skipped)).encode()
        if self._caption_source[0] == "metadata":
            yield self._metadata_bytes

    def list_items(self) -> SourceListing:
        items, skipped = self._listed_items
        source, reason = self._caption_source
        notes = self._tree.notes(self._kind) + self._unused_sidecar_notes(source)
        if self._metadata_file is not None:
            others = metadata.unused_metadata_files(Path(self._root), self._metadata_file)
            notes += [f"{name} is not read: captions come from {self._metadata_file.name}" for name in others]
        if source == "metadata":
            items, more_skipped, more_notes = _with_metadata_captions(items, self._metadata_rows(), self._limit)
            skipped, notes = skipped + more_skipped, notes + more_notes
        return SourceListing(items, tuple(skipped), tuple(notes), f"{source}: {reason}")

    def read_row(self, row: int) -> memoryview:
        raise AssertionError("read_row() was called for a folder, whose items are files")

    def _items(self) -> Iterator[SourceItem]:
        has_sidecars = self._caption_source[0] == "sidecar"
        for key, name, nbytes, mtime_ns in self._tree.media:
            caption: FileSpan | tuple[str, ...] | None = caption_parsing.fixed_caption(self._captions, key)
            if has_sidecars and (entry := self._find_sidecar(key, name)) is not None:
                caption = _caption_span(entry)
            span = FileSpan(f"{self._root}/{name}", 0, nbytes, nbytes, mtime_ns)
            yield SourceItem(key, name, nbytes, span, caption)

    def _find_sidecar(self, key: str, name: str) -> os.DirEntry[str] | None:
        """`a.txt` or `a.jpg.txt` for `a.jpg`."""
        return self._tree.sidecars.get(key) or self._tree.sidecars.get(name)

    def _unused_sidecar_notes(self, source: str) -> list[str]:
        if source != "sidecar" or self._limit is not None:
            return []
        sidecars, media = self._tree.sidecars, self._tree.media
        orphans = sorted(sidecars.keys() - {owner for key, name, _, _ in media for owner in (key, name)})
        duplicates = [name for key, name, _, _ in media if key in sidecars and name in sidecars]
        return [
            *self._unused_notes(orphans, f"no {self._kind} of that name"),
            *self._unused_notes(duplicates, "its file has another caption file with a shorter name"),
        ]

    def _unused_notes(self, names: list[str], reason: str) -> list[str]:
        shown = listing.first_names([name + self._captions.extension for name in names])
        return listing.skipped_note(len(names), "caption file", f"{reason} ({shown})")

    def _metadata_rows(self) -> metadata.MetadataRows:
        if self._metadata_file is None:
            problem = 'captions.source is "metadata", but there is no metadata.jsonl, metadata.csv or metadata.parquet'
            raise SourceError(f"{self._root}: {problem}; set captions.metadata_file")
        return metadata.parse_metadata(self._metadata_file, self._metadata_bytes, self._captions)


def _caption_span(entry: os.DirEntry[str]) -> FileSpan:
    """The location of a caption file. If it is unreadable, staging its sample reports that."""
    try:
        status = entry.stat()
    except OSError:
        return FileSpan(entry.path, 0, 0, -1, 0)  # -1: makes every later read fail as changed
    size = status.st_size if stat.S_ISREG(status.st_mode) else -1
    return FileSpan(entry.path, 0, max(size, 0), size, status.st_mtime_ns)


def _change_stamp(location: FileSpan | tuple[str, ...] | int | None) -> str:
    """Identifies a file's bytes without reading them: its size and modification time; for a caption, its text."""
    if isinstance(location, FileSpan):
        return f"{location.file_bytes} {location.mtime_ns}"
    return repr(location)


def _with_metadata_captions(
    items: list[SourceItem], rows: metadata.MetadataRows, limit: int | None
) -> tuple[list[SourceItem], list[SkippedFile], list[str]]:
    """Items with the captions of a metadata file. Rows only match listed files: no path from the file is opened."""
    kept: list[SourceItem] = []
    skipped: list[SkippedFile] = []
    used: set[str] = set()
    for item in items:
        name = item.name if item.name in rows.cells else item.key
        cells = rows.cells.get(name)
        if cells is None:
            kept.append(item)
            continue
        used.add(name)
        try:
            kept.append(item._replace(caption=metadata.captions_from_cells(cells)))
        except BrokenMediaError as error:
            skipped.append(SkippedFile(item.name, str(error)))
    unknown = [] if limit is not None else sorted(rows.cells.keys() - used)
    notes = listing.skipped_note(len(unknown), "metadata row", f"no such file ({listing.first_names(unknown)})")
    notes += listing.skipped_note(rows.outside_count, "metadata row", "its path is outside the dataset's folder")
    return kept, skipped, notes
