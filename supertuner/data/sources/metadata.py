"""Reads captions from a JSONL, CSV or parquet file; a malformed file raises SourceError with its line."""

from __future__ import annotations

import csv
import io
import json
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from supertuner.config.settings.data import CaptionSettings
from supertuner.core.errors import SourceError
from supertuner.data.sources.caption_parsing import parse_caption_cell

_DEFAULT_NAMES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_EXTRA_CELLS = "(more cells than columns)"
LocatedRow = tuple[str, Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class MetadataRows:
    cells: dict[str, list[object]]
    """File name → its caption cells; several rows of a file are several captions of it."""
    outside_count: int
    """Number of rows whose path is absolute or outside the folder. They match no file."""


def find_metadata_file(root: Path, captions: CaptionSettings) -> Path | None:
    """The metadata file to use; None if there is none."""
    if captions.source not in ("auto", "metadata") or (captions.source == "auto" and captions.constant is not None):
        return None
    if captions.metadata_file is not None:
        return captions.metadata_file
    return next(iter(_existing_metadata_files(root)), None)


def unused_metadata_files(root: Path, used: Path) -> list[str]:
    """Names of metadata files in the folder other than `used`."""
    return [path.name for path in _existing_metadata_files(root) if path != used]


def _existing_metadata_files(root: Path) -> list[Path]:
    return [root / name for name in _DEFAULT_NAMES if (root / name).is_file()]


def read_metadata_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f"captions.metadata_file: {path} cannot be read: {error.strerror}") from error


def parse_metadata(path: Path, content: bytes, captions: CaptionSettings) -> MetadataRows:
    """All rows of `path`, whose bytes are `content`."""
    readers = {".jsonl": _parse_jsonl, ".ndjson": _parse_jsonl, ".csv": _parse_csv, ".parquet": _parse_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise SourceError(f"captions.metadata_file: {path} must end in .jsonl, .csv or .parquet")
    cells: dict[str, list[object]] = {}
    outside_count = 0
    for location, row in reader(path, content):
        name = row.get(captions.file_column)
        if not isinstance(name, str) or captions.caption_column not in row:
            raise SourceError(_missing_column_message(f"{path} {location}", row, captions))
        relative_name = _relative_name(name)
        if relative_name is None:
            outside_count += 1
        else:
            cells.setdefault(relative_name, []).append(row[captions.caption_column])
    return MetadataRows(cells, outside_count)


def captions_from_cells(cells: list[object]) -> tuple[str, ...] | None:
    """The captions of a file from its cells; None if all cells are None."""
    captions = [texts for cell in cells if (texts := parse_caption_cell(cell)) is not None]
    return parse_caption_cell([text for texts in captions for text in texts]) if captions else None


def _relative_name(name: str) -> str | None:
    """`name` as in the listing; None if it is outside the folder."""
    plain = posixpath.normpath(name.replace("\\", "/"))
    return None if plain.startswith(("/", "../")) or plain == ".." else plain


def _missing_column_message(location: str, row: Mapping[str, object], captions: CaptionSettings) -> str:
    if captions.file_column in row and captions.caption_column in row:
        value = row[captions.file_column]
        return f"{location}: {captions.file_column!r} must be a file name, but is {value!r}; repair or remove that row"
    have = ", ".join(repr(str(name)) for name in list(row)[:20])
    return (
        f"{location}: needs the columns {captions.file_column!r} (a file name) and {captions.caption_column!r}; "
        f"it has {have or 'none'}; set captions.file_column and captions.caption_column"
    )


def _parse_jsonl(path: Path, content: bytes) -> Iterator[LocatedRow]:
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:  # bytes that are not UTF-8 become surrogates, so that only their sample is set aside
            row = json.loads(line.decode("utf-8", "surrogateescape"))
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{path} line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise SourceError(f'{path} line {number}: must be an object like {{"file_name": …, "text": …}}')
        yield f"line {number}", row


def _parse_csv(path: Path, content: bytes) -> Iterator[LocatedRow]:
    text = content.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True, restkey=_EXTRA_CELLS)
    try:
        for row in reader:
            if _EXTRA_CELLS in row:  # an unquoted comma would otherwise silently truncate the caption
                raise SourceError(f"{path} line {reader.line_num}: more cells than columns; quote texts with commas")
            yield f"line {reader.line_num}", row
    except csv.Error as error:
        raise SourceError(f"{path} line {reader.line_num}: not CSV: {error}") from error


def _parse_parquet(path: Path, content: bytes) -> Iterator[LocatedRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(pa.BufferReader(content))
        at = 0
        for batch in table.iter_batches(batch_size=4096):
            for row in batch.to_pylist():
                at += 1
                yield f"row {at}", row
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{path}: not a readable parquet file: {error}") from error
