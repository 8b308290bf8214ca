"""The interface through which ordering and batching read a dataset; a staged dataset implements it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from supertuner.core.types import MediaKind


class MediaMetadata(Protocol):
    """Metadata that is known before samples are decoded: one array each, with one element per sample.

    An element is 0 where the quantity has no meaning for the kind of media.
    """

    @property
    def width(self) -> NDArray[np.int32]:
        """As displayed."""

    @property
    def height(self) -> NDArray[np.int32]:
        """As displayed."""

    @property
    def frames(self) -> NDArray[np.int32]: ...
    @property
    def fps(self) -> NDArray[np.float32]: ...
    @property
    def seconds(self) -> NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class MediaMetadataSlice:
    """The metadata of consecutive samples."""

    width: NDArray[np.int32]
    height: NDArray[np.int32]
    frames: NDArray[np.int32]
    fps: NDArray[np.float32]
    seconds: NDArray[np.float32]


def slice_metadata(metadata: MediaMetadata, begin: int, end: int) -> MediaMetadataSlice:
    rows = slice(begin, end)
    return MediaMetadataSlice(
        metadata.width[rows],
        metadata.height[rows],
        metadata.frames[rows],
        metadata.fps[rows],
        metadata.seconds[rows],
    )


class SampleCollection(MediaMetadata, Protocol):
    """A dataset's samples by index."""

    @property
    def id(self) -> str: ...
    @property
    def kind(self) -> MediaKind: ...
    @property
    def fingerprint(self) -> str: ...

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
