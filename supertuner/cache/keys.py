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

EntryKeys: TypeAlias = NDArray[np.bytes_]
"""Keys of entries: 32 hexadecimal digits each, 128 bits."""

KEY_WIDTH = 32
CACHE_FORMAT_VERSION = 1
"""Raise it when the fields of an entry, or what they mean, change."""
_KEY_DTYPE = f"S{KEY_WIDTH}"


@dataclass(frozen=True, slots=True)
class CacheNamespace:
    """What all entries made by one encoder share."""

    kind: str
    """`latents` or `text`."""
    encoder_fingerprint: str
    """Fingerprint of the encoder: its weights and configs."""
    dtype: str
    """Number format in which it computed, or in which its result is stored."""
    version: int = CACHE_FORMAT_VERSION

    @property
    def name(self) -> str:
        """For arenas: what they hold, and eight digits of by whom it was made."""
        return f"{self.kind}-{self._digest().hexdigest()[:8]}"

    def entry_keys(self, contents: Iterable[bytes], transform: bytes = b"") -> EntryKeys:
        """The keys of entries made of `contents`, each brought into form by the same `transform`."""
        digest = self._digest()
        digest.update(len(transform).to_bytes(8, "little") + transform)

        def key(content: bytes) -> str:
            entry_digest = digest.copy()
            entry_digest.update(content)
            return entry_digest.hexdigest()

        return np.array([key(content) for content in contents], _KEY_DTYPE)

    def _digest(self) -> hashlib.blake2b:
        parts = [self.version, self.kind, self.encoder_fingerprint, self.dtype]
        return hashlib.blake2b(json.dumps(parts).encode() + b"\0", digest_size=KEY_WIDTH // 2)


def empty_keys() -> EntryKeys:
    return np.zeros(0, _KEY_DTYPE)


def unique_keys(keys: EntryKeys) -> tuple[EntryKeys, NDArray[np.intp]]:
    """Each key once, in the order of first appearance, and where that is."""
    _, first = np.unique(keys, return_index=True)
    first_indices = np.sort(first)
    return keys[first_indices], first_indices


def key_text(key: np.bytes_ | bytes) -> str:
    return bytes(key).decode()
