"""Parses captions, and decides where a folder's captions come from. Pure; raises BrokenMediaError for bad captions."""

from __future__ import annotations

import json
from typing import Literal

from supertuner.config.settings.data import CaptionSettings
from supertuner.core.errors import BrokenMediaError
from supertuner.core.types import KIB

MAX_CAPTION_BYTES = 64 * KIB
"""Limit for all captions of one sample. A larger file is not a caption file, and would fill unplanned memory."""

CaptionSource = Literal["sidecar", "metadata", "filename", "constant", "none"]
_BOM = b"\xef\xbb\xbf"


def parse_caption_file(content: bytes, *, one_per_line: bool) -> tuple[str, ...]:
    """The captions in a caption file: its whole text, or one per non-empty line."""
    require_caption_size(len(content))
    try:
        text = content.removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        raise BrokenMediaError(f"caption is not UTF-8 (byte {error.start})") from error
    if "\0" in text:
        raise BrokenMediaError("caption contains NUL characters; is it UTF-16? Save it as UTF-8")
    lines = text.splitlines() if one_per_line else [text]
    return tuple(stripped for line in lines if (stripped := line.strip())) or ("",)


def parse_caption_json(content: bytes, column: str) -> tuple[str, ...] | None:
    """The captions in a field of a WebDataset sample's JSON member; None without such a field."""
    require_caption_size(len(content))
    try:
        record = json.loads(content.removeprefix(_BOM))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise BrokenMediaError(f"caption is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise BrokenMediaError("caption is JSON but not an object")
    return parse_caption_cell(record.get(column))


def parse_caption_cell(cell: object) -> tuple[str, ...] | None:
    """The captions in a table cell, which contains a text, a list of texts, or None."""
    if cell is None:
        return None
    texts: list[str] = []
    for text in cell if isinstance(cell, list | tuple) else (cell,):
        if not isinstance(text, str):
            raise BrokenMediaError(f"caption is not a text but {type(text).__name__}")
        texts.append(text.strip())
    try:
        require_caption_size(sum(len(text.encode()) for text in texts))
    except UnicodeEncodeError as error:  # bytes that are not UTF-8 were decoded to lone surrogates
        raise BrokenMediaError("caption is not UTF-8") from error
    return tuple(texts)


def require_caption_size(nbytes: int) -> None:
    if nbytes > MAX_CAPTION_BYTES:
        raise BrokenMediaError(f"caption of {nbytes} bytes; at most {MAX_CAPTION_BYTES} are allowed")


def fixed_caption(captions: CaptionSettings, key: str) -> tuple[str, ...] | None:
    """The caption that a sample gets from the settings: its file name, or the constant; None: read it."""
    if captions.source == "filename":
        return (key.rpartition("/")[2],)
    if captions.source == "constant" or (captions.source == "auto" and captions.constant is not None):
        return (captions.constant or "",)
    return None


def choose_caption_source(captions: CaptionSettings, metadata: str | None, sidecars: int) -> tuple[CaptionSource, str]:
    """The caption source and the reason. `metadata` is a metadata file's name, `sidecars` counts caption files."""
    if captions.source != "auto":
        return captions.source, "as configured"
    if captions.constant is not None:
        return "constant", "captions.constant is set"
    if metadata is not None:
        return "metadata", f"the folder contains {metadata}"
    if sidecars:
        return "sidecar", f"{sidecars} files end in {captions.extension}"
    return "none", f"no metadata file and no {captions.extension} files"
