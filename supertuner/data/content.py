"""What decides the pixels or sounds of a sample in a batch, as bytes: equal bytes mean equal media. Pure.

A sample's media follow from its file's bytes, the shape of its bucket, the change of its turn, and how it is decoded
and resized; a name, a path, a seed or a place in the order change nothing by themselves.
"""

from __future__ import annotations

import json
from dataclasses import astuple

from supertuner.config.settings.data import Dataset
from supertuner.core.types import MediaKind
from supertuner.data.batching.augment import Change
from supertuner.data.ordering.buckets import Bucket

RENDER_VERSION = 1
"""Raise it whenever decoding, resizing or augmentation give other values for the same bytes and settings."""


def transform(settings: Dataset, bucket: Bucket, change: Change, version: int = RENDER_VERSION) -> bytes:
    """Everything but the file's own bytes."""
    picture = bucket.kind is not MediaKind.AUDIO
    parts = {
        "version": version,
        "kind": bucket.kind,
        "shape": bucket.shape,
        "sample_rate": bucket.sample_rate,
        "filter": settings.resize_filter if picture else "",
        "fps": settings.fps if bucket.kind is MediaKind.VIDEO else None,
        "change": [float(value).hex() for value in astuple(change)],
    }
    return json.dumps(parts, sort_keys=True).encode()


def why_media_vary(settings: Dataset) -> str:
    """The settings by which a sample looks or sounds different from turn to turn; empty if it never does."""
    reasons = [f"augment.{name}" for name, value in settings.augment if value]
    return ", ".join([*reasons, *(['crop: "random"'] if settings.crop == "random" else [])])


def why_captions_vary(settings: Dataset) -> str:
    """The settings by which a sample has more captions than can be listed; empty if they can be."""
    return "captions.shuffle_tags" if settings.captions.shuffle_tags else ""
