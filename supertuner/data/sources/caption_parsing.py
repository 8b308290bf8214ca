"""Caption bytes become text or a reason why not; which caption source a folder has is decided here, purely."""

from __future__ import annotations

import json
from typing import Literal

from supertuner.config.settings.data import CaptionSettings
from supertuner.core.errors import BrokenMediaError
from supertuner.core.types import KIB

MAX_CAPTION_BYTES = 64 * KIB
"""All captions of one sample together. More is a wrong file, and would fill memory that nobody planned."""

CaptionSource = Literal["sidecar", "metadata", "filename", "constant", "none"]
_BOM = b"\xef\xbb\xbf"


def parse_caption_file(content: bytes, *, one_per_line: bool) -> tuple[str, ...]:
    """Captions of one caption file: its whole text, or one per line that is not empty."""
    _require_caption_size(len(content))
    try:
        text = content.removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        raise BrokenMediaError(f"caption is not UTF-8 (byte {error.start})") from error
    if "\0" in text:
        raise BrokenMediaError("caption holds zero bytes; is it UTF-16? Save it as UTF-8")
    if one_per_line:
        lines = tuple(stripped for line in text.splitlines() if (stripped := line.strip()))
        return lines or ("",)
    return (text.strip(),)


def parse_caption_json(content: bytes, column: str) -> tuple[str, ...] | None:
    """Captions in a JSON member of a WebDataset sample; None if it has no such field."""
    _require_caption_size(len(content))
    try:
        record = json.loads(content.removeprefix(_BOM))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise BrokenMediaError(f"caption is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise BrokenMediaError("caption is JSON but not an object")
    return parse_caption_cell(record.get(column))


def parse_caption_cell(cell: object) -> tuple[str, ...] | None:
    """Captions in a cell of a table: text, a list of texts, or None."""
    if cell is None:
        return None
    texts: list[str] = []
    for text in cell if isinstance(cell, list | tuple) else (cell,):
        if not isinstance(text, str):
            raise BrokenMediaError(f"caption is not text but {type(text).__name__}")
        texts.append(text.strip())
    try:
        _require_caption_size(sum(len(text.encode()) for text in texts))
    except UnicodeEncodeError as error:  # bytes that were not UTF-8 arrive as lone surrogates
        raise BrokenMediaError("caption is not UTF-8") from error
    return tuple(texts)


def _require_caption_size(nbytes: int) -> None:
    if nbytes > MAX_CAPTION_BYTES:
        raise BrokenMediaError(f"caption of {nbytes} bytes; at most {MAX_CAPTION_BYTES} are allowed")


def choose_caption_source(
    captions: CaptionSettings, *, metadata: str | None, sidecars: int
) -> tuple[CaptionSource, str]:
    """Which source of captions to use and why, given a metadata file's name and the number of caption files seen."""
    if captions.source != "auto":
        return captions.source, "as configured"
    if captions.constant is not None:
        return "constant", "captions.constant is set"
    if metadata is not None:
        return "metadata", f"there is {metadata}"
    if sidecars:
        return "sidecar", f"{sidecars} files end in {captions.extension}"
    return "none", f"no metadata file and no {captions.extension} files"
