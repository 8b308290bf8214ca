"""What batches need of a dataset: bytes and captions by number, measures as columns. A staged dataset is one."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from supertuner.core.types import MediaKind


class SampleCollection(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def kind(self) -> MediaKind: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def width(self) -> NDArray[np.int32]:
        """As displayed; all columns are as long as the dataset, with 0 where something has no meaning."""

    @property
    def height(self) -> NDArray[np.int32]: ...
    @property
    def frames(self) -> NDArray[np.int32]: ...
    @property
    def fps(self) -> NDArray[np.float32]: ...
    @property
    def seconds(self) -> NDArray[np.float32]: ...

    def __len__(self) -> int: ...

    def key(self, i: int, /) -> str:
        """The sample's name within the dataset."""

    def media(self, i: int, /) -> memoryview:
        """The file's bytes."""

    def content_digests(self) -> NDArray[np.uint64]:
        """What each sample's bytes are known by, one row each: equal rows mean equal bytes."""

    def captions(self, i: int, /) -> tuple[str, ...]: ...

    def caption_digest(self) -> str:
        """What the captions of all samples are known by: equal digests mean equal captions."""
