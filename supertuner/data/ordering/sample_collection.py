"""The interface through which ordering and batching read a dataset; a staged dataset implements it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class SampleCollection(Protocol):
    """A dataset's samples by index.

    Metadata that is known before samples are decoded has one array each, with one element per sample; an element is 0
    where the quantity has no meaning for the kind of media.
    """

    id: str
    fingerprint: str
    width: NDArray[np.int32]
    """As displayed."""
    height: NDArray[np.int32]
    frames: NDArray[np.int32]
    fps: NDArray[np.float32]
    seconds: NDArray[np.float32]

    def __len__(self) -> int: ...

    def key(self, i: int, /) -> str:
        """The sample's name within the dataset."""

    def media(self, i: int, /) -> memoryview:
        """The file's bytes."""

    def content_digests(self) -> NDArray[np.uint64]:
        """One row per sample that identifies the file's bytes: equal rows mean equal bytes."""

    def captions(self, i: int, /) -> tuple[str, ...]: ...

    def caption_digest(self) -> str:
        """Digest of the captions of all samples: equal digests mean equal captions."""


@dataclass(frozen=True, slots=True)
class MediaMetadataSlice:
    """The metadata of consecutive samples."""

    width: NDArray[np.int32]
    height: NDArray[np.int32]
    frames: NDArray[np.int32]
    fps: NDArray[np.float32]
    seconds: NDArray[np.float32]


def slice_metadata(samples: SampleCollection, begin: int, end: int) -> MediaMetadataSlice:
    rows = slice(begin, end)
    return MediaMetadataSlice(
        samples.width[rows], samples.height[rows], samples.frames[rows], samples.fps[rows], samples.seconds[rows]
    )
