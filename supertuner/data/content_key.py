"""What decides the pixels or sounds of a sample in a batch, as bytes: equal bytes mean equal media. Pure.

A sample's media follow from its file's bytes, the shape of its bucket, the change of its turn, and how it is decoded
and resized; a name, a path, a seed or a place in the order change nothing by themselves.
"""

from __future__ import annotations

import json
from dataclasses import astuple

from supertuner.config.settings.data import DatasetSettings
from supertuner.core.types import MediaKind
from supertuner.data.batching.augment import AugmentationParams
from supertuner.data.ordering.buckets import Bucket

RENDER_VERSION = 1
"""Raise it whenever decoding, resizing or augmentation give other values for the same bytes and settings."""


def transform_key_bytes(
    settings: DatasetSettings, bucket: Bucket, augmentation: AugmentationParams, version: int = RENDER_VERSION
) -> bytes:
    """Everything but the file's own bytes."""
    is_visual = bucket.kind is not MediaKind.AUDIO
    parts = {
        "version": version,
        "kind": bucket.kind,
        "shape": bucket.shape,
        "sample_rate": bucket.sample_rate,
        "filter": settings.resize_filter if is_visual else "",
        "fps": settings.fps if bucket.kind is MediaKind.VIDEO else None,
        "change": [float(value).hex() for value in astuple(augmentation)],
    }
    return json.dumps(parts, sort_keys=True).encode()


def varying_media_settings(settings: DatasetSettings) -> str:
    """The settings by which a sample looks or sounds different from turn to turn; empty if it never does."""
    reasons = [f"augment.{name}" for name, value in settings.augment if value]
    return ", ".join([*reasons, *(['crop: "random"'] if settings.crop == "random" else [])])


def varying_caption_settings(settings: DatasetSettings) -> str:
    """The settings by which a sample has more captions than can be listed; empty if they can be."""
    return "captions.shuffle_tags" if settings.captions.shuffle_tags else ""
