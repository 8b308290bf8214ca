"""Fingerprints of staged datasets: equal fingerprints mean equal staged bytes. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from supertuner.config.settings.data import DatasetSettings

STAGED_VERSION = 1
"""Increase it when the fields or columns of a staged dataset change, so that old arenas are not reused."""
_NAME_CHARS = 64


def dataset_fingerprint(dataset: DatasetSettings, parts: Iterable[bytes]) -> str:
    """Digest of the source's contents and of the settings that change what is stored; bucket settings do not."""
    digest = hashlib.blake2b(_settings(dataset), digest_size=16)
    for chunk in parts:
        digest.update(len(chunk).to_bytes(8, "little"))
        digest.update(chunk)
    return digest.hexdigest()


def origin_digest(dataset: DatasetSettings) -> str:
    """Digest of the source's path and of the same settings, which is known even if the source is gone."""
    paths = [str(dataset.instance_data_dir), str(dataset.captions.metadata_file)]
    return hashlib.blake2b(_settings(dataset) + json.dumps(paths).encode(), digest_size=16).hexdigest()


def _settings(dataset: DatasetSettings) -> bytes:
    captions = dataset.captions
    settings = {
        "version": STAGED_VERSION,
        "kind": dataset.dataset_type,
        "format": dataset.format,
        "limit": dataset.limit,
        "check": dataset.check,
        "compression": dataset.in_memory.compression or "none",
        "captions": [captions.source, captions.extension, captions.several, captions.constant],
        "columns": [captions.file_column, captions.caption_column],
    }
    return json.dumps(settings, sort_keys=True).encode()


def arena_name(dataset_id: str, fingerprint: str) -> str:
    """The dataset's id and its version: `cats-0f3a…`."""
    return f"{(dataset_id or 'dataset')[:_NAME_CHARS]}-{fingerprint[:16]}"
