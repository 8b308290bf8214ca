"""StagedDataset: reads a staged dataset from its arena: media and captions by index, metadata as shared columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from supertuner.arena.home import ArenaHome
from supertuner.arena.reader import ArenaReader, VerifyMode
from supertuner.core.closing import CloseOnExit, close_on_error
from supertuner.core.errors import ArenaDamagedError
from supertuner.core.events import Progress
from supertuner.core.types import MediaKind
from supertuner.data.staging.columns import CAPTION_BYTES, CAPTION_INDEX, CAPTION_OFFSETS
from supertuner.data.staging.compress import RAW_CODEC, decompress
from supertuner.data.staging.fingerprint import STAGED_VERSION

MEDIA_FIELD = "media"
"""The field of a unit that contains a file's bytes."""
SET_ASIDE_TABLE = "set_aside"
"""The table with broken files and reasons, as JSON."""


class StagedDataset(CloseOnExit):
    """Gives views, not copies: all processes of the node that open it share the same memory."""

    def __init__(self, reader: ArenaReader) -> None:
        meta = reader.meta
        if meta.get("holds") != "staged dataset" or meta.get("version") != STAGED_VERSION:
            actual = f"contains {meta.get('holds')!r} of version {meta.get('version')}"
            raise ArenaDamagedError(reader.name, f"{actual}, not a staged dataset of version {STAGED_VERSION}")
        self._reader = reader
        self.meta: Mapping[str, Any] = meta
        self.id = str(meta["dataset"])
        self.kind = MediaKind(str(meta["kind"]))
        self.fingerprint = str(meta["fingerprint"])
        self.width: NDArray[np.int32] = reader.table("width")
        self.height: NDArray[np.int32] = reader.table("height")
        """As displayed."""
        self.orientation: NDArray[np.int32] = reader.table("orientation")
        """EXIF orientation (1 to 8) that a decoder must apply to get the displayed image."""
        self.frames: NDArray[np.int32] = reader.table("frames")
        self.fps: NDArray[np.float32] = reader.table("fps")
        self.seconds: NDArray[np.float32] = reader.table("seconds")
        self.sample_rate: NDArray[np.int32] = reader.table("sample_rate")
        self.channels: NDArray[np.int32] = reader.table("channels")
        self._caption_index = reader.table(CAPTION_INDEX)
        self._caption_offsets = reader.table(CAPTION_OFFSETS)
        self._caption_bytes = reader.table(CAPTION_BYTES)

    @classmethod
    def open(cls, home: ArenaHome, arena: str, *, verify: VerifyMode = "on_demand") -> StagedDataset:
        """Attach to the arena of this name and validate it."""
        return cls.from_reader(home.attach(arena, verify=verify))

    @classmethod
    def from_reader(cls, reader: ArenaReader) -> StagedDataset:
        """The dataset in `reader`'s arena. Closes the reader if it contains none."""
        with close_on_error(reader):
            return cls(reader)

    def __len__(self) -> int:
        return len(self._reader)

    def key(self, i: int) -> str:
        return self._reader.key(i)

    def media(self, i: int) -> memoryview:
        """The file's bytes as in the source: a view, or new memory if the file is stored compressed."""
        stored = self._reader.view(i, MEDIA_FIELD)
        codec = self._reader.codec(i, MEDIA_FIELD)
        return stored if codec == RAW_CODEC else decompress(codec, stored, self._reader.raw_nbytes(i, MEDIA_FIELD))

    def content_digests(self) -> NDArray[np.uint64]:
        """One row per sample that identifies its stored bytes: equal rows mean equal files. Reads no file.

        A row contains the 64-bit checksum and the sizes that staging stored. The probability that two of a million
        different files of equal size have the same row is 3e-8. Colliding files can be constructed, but harm only the
        user who does so.
        """
        return self._reader.record_fingerprints(MEDIA_FIELD)

    def captions(self, i: int) -> tuple[str, ...]:
        """All captions of a sample, in order; empty if it has none."""
        first, last = int(self._caption_index[i]), int(self._caption_index[i + 1])
        offsets = self._caption_offsets[first : last + 1].tolist()
        return tuple(self._caption_bytes[a:b].tobytes().decode() for a, b in pairwise(offsets))

    def caption_digest(self) -> str:
        """Digest of the captions of all samples."""
        digest = xxhash.xxh3_128()
        for table in (self._caption_index, self._caption_offsets, self._caption_bytes):
            digest.update(f"{len(table)}\n".encode())
            digest.update(np.ascontiguousarray(table).view(np.uint8).data)
        return digest.hexdigest()

    def set_aside(self) -> list[tuple[str, str]]:
        """Files that were broken when the dataset was staged, with the reasons."""
        return [(file, reason) for file, reason in json.loads(self._reader.table(SET_ASIDE_TABLE).tobytes())]

    def verify(self, progress: Progress) -> None:
        """Verify every byte. Raises ArenaDamagedError, which names the damaged file."""
        self._reader.verify(progress)

    def close(self) -> None:
        self._reader.close()
