"""What a cached entry is called: a digest of everything that decides its bits. Change any ingredient, change the key.

So an entry is found only by those for whom it is right: there is nothing to invalidate, samples and captions that occur
twice are stored once, and datasets share a cache without knowing of each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Keys: TypeAlias = NDArray[np.bytes_]
"""Keys of entries: 32 hexadecimal digits each, 128 bits."""

WIDTH = 32
FORMAT = 1
"""Raise it when the fields of an entry, or what they mean, change."""
_KEY = f"S{WIDTH}"


@dataclass(frozen=True, slots=True)
class Space:
    """What all entries made by one encoder share."""

    what: str
    """`latents` or `text`."""
    identity: str
    """Fingerprint of the encoder: its weights and configs."""
    dtype: str
    """Number format in which it computed, or in which its result is stored."""
    version: int = FORMAT

    @property
    def name(self) -> str:
        """For arenas: what they hold, and eight digits of by whom it was made."""
        return f"{self.what}-{self._digest().hexdigest()[:8]}"

    def keys(self, contents: Iterable[bytes], transform: bytes = b"") -> Keys:
        """The keys of entries made of `contents`, each brought into form by the same `transform`."""
        digest = self._digest()
        digest.update(len(transform).to_bytes(8, "little") + transform)

        def key(content: bytes) -> str:
            one = digest.copy()
            one.update(content)
            return one.hexdigest()

        return np.array([key(content) for content in contents], _KEY)

    def _digest(self) -> hashlib.blake2b:
        parts = [self.version, self.what, self.identity, self.dtype]
        return hashlib.blake2b(json.dumps(parts).encode() + b"\0", digest_size=WIDTH // 2)


def no_keys() -> Keys:
    return np.zeros(0, _KEY)


def unique(keys: Keys) -> tuple[Keys, NDArray[np.intp]]:
    """Each key once, in the order of first appearance, and where that is."""
    _, first = np.unique(keys, return_index=True)
    places = np.sort(first)
    return keys[places], places


def text(key: np.bytes_ | bytes) -> str:
    return bytes(key).decode()
