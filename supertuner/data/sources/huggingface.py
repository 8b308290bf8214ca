"""HuggingFaceSource: a dataset saved with `save_to_disk`, or downloaded from the hub as Parquet files, with media and
captions in columns. Runs no code of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from supertuner.config.settings.data import CaptionSettings
from supertuner.core.durable import resolve_inside
from supertuner.core.errors import BrokenMediaError, SourceError
from supertuner.core.types import MediaKind
from supertuner.data.sources.caption_parsing import fixed_caption, parse_caption_cell
from supertuner.data.sources.listing import FileSpan, SkippedFile, SourceItem, SourceListing

if TYPE_CHECKING:
    import datasets

_BATCH_ROWS = 256


def is_saved_dataset(root: Path) -> bool:
    files = ("state.json", "dataset_info.json")
    return (root / "dataset_dict.json").is_file() or all((root / name).is_file() for name in files)


def parquet_files(root: Path) -> list[Path]:
    """The Parquet files of a dataset as the hub holds it: of its split `train`, or all if no name has a split."""
    files = sorted(path for path in root.rglob("*.parquet") if not path.name.startswith("metadata"))
    return [path for path in files if path.name.startswith("train")] or files


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object; empty if the file is missing or not one, which the library then reports."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


class HuggingFaceSource:
    """A sample's key is its row number. Media stored as bytes are staged from the mapped table without another copy."""

    def __init__(self, root: Path, kind: MediaKind, captions: CaptionSettings, limit: int | None) -> None:
        self._root = Path(os.path.realpath(root))
        self._kind, self._captions, self._limit = kind, captions, limit

    def fingerprint_parts(self) -> Iterable[bytes]:
        yield b"huggingface"
        for path in sorted(self._root.rglob("*")):
            if path.is_file():
                status = path.stat()
                yield f"{path.relative_to(self._root)}\0{status.st_size}\0{status.st_mtime_ns}".encode()

    def list_items(self) -> SourceListing:
        if self._captions.metadata_file is not None or self._captions.source == "sidecar":
            remedy = "remove captions.source and captions.metadata_file, and set captions.caption_column"
            raise SourceError(f"{self._root}: a Hugging Face dataset has its captions in a column; {remedy}")
        items: list[SourceItem] = []
        skipped: list[SkippedFile] = []
        count, column = len(self._dataset), self._captions.caption_column
        rows = count if self._limit is None else min(self._limit, count)
        digits = len(str(max(count - 1, 0)))
        has_captions = column in self._dataset.column_names
        for begin in range(0, rows, _BATCH_ROWS):
            for row, media, cell in self._read_batch(begin, min(begin + _BATCH_ROWS, rows), has_captions):
                name = f"row {row}"
                try:
                    items.append(self._build_item(row, f"{row:0{digits}d}", name, media, cell))
                except BrokenMediaError as error:
                    skipped.append(SkippedFile(name, str(error)))
        origin = f"metadata: column {column!r}"
        if not has_captions:
            have = ", ".join(self._dataset.column_names)
            origin = f"none: no column {column!r} (captions.caption_column); the columns are {have}"
        return SourceListing(items, tuple(skipped), (), origin)

    def read_row(self, row: int) -> memoryview:
        """The bytes of one row, as a view of the mapped table."""
        scalar = self._dataset[row : row + 1].column(self._media_column_name)[0]
        return memoryview(scalar["bytes"].as_buffer())

    @cached_property
    def _dataset(self) -> datasets.Dataset:
        """The only split, or `train`; media columns are not decoded."""
        try:
            import datasets
        except ImportError as error:
            remedy = "pip install 'supertuner[huggingface]'"
            raise SourceError(f"{self._root} is a Hugging Face dataset, which needs an extra: {remedy}") from error
        self._refuse_outside_files()
        try:
            loaded = self._load(datasets)
        except Exception as error:  # the library raises many types for damaged files
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            message = f"cannot be loaded as a Hugging Face dataset ({problem}); save it again, or set format"
            raise SourceError(f"{self._root}: {message}") from error
        if isinstance(loaded, datasets.DatasetDict):
            name = "train" if "train" in loaded else next(iter(loaded)) if len(loaded) == 1 else None
            if name is None:
                problem = f"has the splits {', '.join(loaded)} and none is called train"
                raise SourceError(f"{self._root} {problem}; set instance_data_dir to the folder of one split")
            loaded = loaded[name]
        return loaded.with_format("arrow")

    def _load(self, library: Any) -> Any:
        if is_saved_dataset(self._root):
            return library.load_from_disk(str(self._root))
        return library.Dataset.from_parquet([str(path) for path in parquet_files(self._root)])

    def _refuse_outside_files(self) -> None:
        """Raise SourceError if the dataset's own files name a table or a split outside its folder."""
        splits = _read_object(self._root / "dataset_dict.json").get("splits")
        names = [str(name) for name in splits] if isinstance(splits, list) else []
        for name in names:
            self._require_inside(name, "dataset_dict.json")
        for folder in [self._root / name for name in names] or [self._root]:
            files = _read_object(folder / "state.json").get("_data_files")
            for file in files if isinstance(files, list) else []:
                table = str(file.get("filename")) if isinstance(file, dict) else ""
                self._require_inside(os.path.join(os.path.relpath(folder, self._root), table), "state.json")

    def _require_inside(self, name: str, source: str) -> None:
        if resolve_inside(self._root, name) is None:
            problem = f"{source} names {name!r}, which is outside this folder"
            raise SourceError(f"{self._root}: {problem}; save the dataset again with save_to_disk")

    @cached_property
    def _media_column_name(self) -> str:
        """The media column: the one named like the kind, or the only one of that type."""
        kind: str = self._kind.value
        candidates = [name for name, type_ in self._dataset.features.items() if type(type_).__name__.lower() == kind]
        if kind in candidates:
            return kind
        if len(candidates) != 1:
            have = ", ".join(self._dataset.column_names)
            raise SourceError(f"{self._root}: no column of type {self._kind} (or several); its columns are {have}")
        return str(candidates[0])

    def _read_batch(self, begin: int, end: int, has_captions: bool) -> list[tuple[int, Any, object]]:
        table = self._dataset[begin:end]
        media = table.column(self._media_column_name)
        cells = table.column(self._captions.caption_column).to_pylist() if has_captions else [None] * len(media)
        return [(begin + i, media[i], cells[i]) for i in range(len(media))]

    def _build_item(self, row: int, key: str, name: str, media: Any, cell: object) -> SourceItem:
        if not media.is_valid:
            raise BrokenMediaError("no media in this row")
        caption = fixed_caption(self._captions, key)
        if caption is None and self._captions.source != "none":
            caption = parse_caption_cell(cell)
        content = media["bytes"]
        if content.is_valid:
            nbytes = content.as_buffer().size
            if not nbytes:
                raise BrokenMediaError("zero bytes")
            return SourceItem(key, name, nbytes, row, caption)
        span = self._file_span(media["path"].as_py())
        return SourceItem(key, name, span.nbytes, span, caption)

    def _file_span(self, path: str | None) -> FileSpan:
        """The file that a row names. Only files inside the dataset's folder are opened."""
        resolved = resolve_inside(self._root, path) if path else None
        if resolved is None:
            raise BrokenMediaError(f"its bytes are not in the dataset, and {path!r} is outside its folder")
        try:
            status = resolved.stat()
        except OSError as error:
            raise BrokenMediaError(f"its file {path!r} is unreadable: {error.strerror}") from error
        return FileSpan(str(resolved), 0, status.st_size, status.st_size, status.st_mtime_ns)
