"""Collects each sample's metadata and captions as columns, without an object per sample, for the arena's tables."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from supertuner.data.probe.media_info import MediaInfo

COLUMNS: Mapping[str, str] = {
    "width": "i",
    "height": "i",
    "orientation": "i",
    "frames": "i",
    "fps": "f",
    "seconds": "f",
    "sample_rate": "i",
    "channels": "i",
}
"""Table name → type code. MediaInfo has the same fields in the same order after `format`."""
CAPTION_INDEX, CAPTION_OFFSETS, CAPTION_BYTES = "caption_index", "caption_offsets", "caption_bytes"


class StagedColumns:
    """Rows of the samples that one thread staged, in its order."""

    def __init__(self) -> None:
        self.items = array("q")
        self.info_columns: tuple[array[Any], ...] = tuple(array(code) for code in COLUMNS.values())
        self._caption_counts = array("q")
        self._caption_lengths = array("q")
        self._caption_bytes = bytearray()

    def __len__(self) -> int:
        return len(self.items)

    def extend(self, items: Sequence[int], infos: Sequence[MediaInfo], captions: Sequence[tuple[str, ...]]) -> None:
        """Append samples, given by their indices in the listing. A whole chunk costs little more than one row."""
        self.items.extend(items)
        for column, values in zip(self.info_columns, list(zip(*infos, strict=True))[1:], strict=bool(infos)):
            column.extend(values)
        self._caption_counts.extend(map(len, captions))
        texts = [caption.encode() for sample_captions in captions for caption in sample_captions]
        self._caption_lengths.extend(map(len, texts))
        self._caption_bytes += b"".join(texts)

    def captions(self) -> list[list[bytes]]:
        """Each sample's captions in UTF-8, in the order of `items`."""
        captions, at, text = [], 0, 0
        for count in self._caption_counts:
            sample_captions = []
            for length in self._caption_lengths[at : at + count]:
                sample_captions.append(bytes(self._caption_bytes[text : text + length]))
                text += length
            captions.append(sample_captions)
            at += count
        return captions


def build_tables(parts: Sequence[StagedColumns]) -> dict[str, NDArray[Any]]:
    """The arena's tables: the rows of all threads in the order of the listing, which is the order of the arena."""
    items = np.concatenate([np.array(part.items, dtype=np.int64) for part in parts])
    order = np.argsort(items, kind="stable")
    result: dict[str, NDArray[Any]] = {}
    for number, (name, code) in enumerate(COLUMNS.items()):
        values = np.concatenate([np.array(part.info_columns[number]) for part in parts])
        result[name] = values[order].astype(np.int32 if code == "i" else np.float32)
    captions = [sample_captions for part in parts for sample_captions in part.captions()]
    ordered = [captions[at] for at in order]
    result[CAPTION_INDEX] = _offsets(len(sample_captions) for sample_captions in ordered)
    flat = [text for sample_captions in ordered for text in sample_captions]
    result[CAPTION_OFFSETS] = _offsets(len(text) for text in flat)
    result[CAPTION_BYTES] = np.frombuffer(b"".join(flat), np.uint8)
    return result


def _offsets(lengths: Any) -> NDArray[np.int64]:
    counts = np.fromiter(lengths, np.int64)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
