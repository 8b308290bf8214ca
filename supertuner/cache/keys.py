"""Keys of cache entries: digests of everything that determines an entry's bits, so a changed input changes the key.

An entry is therefore only found by inputs for which it is correct: nothing is ever invalidated, equal samples and
captions share one entry, and datasets share a cache without knowing of each other.
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
"""Keys of entries: 32 hexadecimal digits (128 bits) each."""

KEY_WIDTH = 32
CACHE_FORMAT_VERSION = 1
"""Increase it when the fields of an entry, or their meaning, change."""
_KEY_DTYPE = f"S{KEY_WIDTH}"


@dataclass(frozen=True, slots=True)
class CacheNamespace:
    """The part of the key that all entries of one encoder share."""

    kind: str
    """`latents` or `text`."""
    encoder_fingerprint: str
    """Digest of the encoder's weights and configuration files."""
    dtype: str
    """Precision in which the encoder computes, or in which its output is stored."""
    version: int = CACHE_FORMAT_VERSION

    @property
    def name(self) -> str:
        """Prefix of the arenas' names: the kind and the first eight digits of the namespace's digest."""
        return f"{self.kind}-{self._digest().hexdigest()[:8]}"

    def entry_keys(self, contents: Iterable[bytes], transform: bytes = b"") -> EntryKeys:
        """The key of each of `contents`, all of which are preprocessed by the same `transform`."""
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
    """The distinct keys in order of first appearance, and the index of each first appearance."""
    _, first = np.unique(keys, return_index=True)
    first_indices = np.sort(first)
    return keys[first_indices], first_indices


def key_text(key: np.bytes_ | bytes) -> str:
    return bytes(key).decode()
