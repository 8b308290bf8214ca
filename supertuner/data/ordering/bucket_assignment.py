"""Derives a dataset's table of buckets from its settings, and each sample's bucket from its metadata. Pure."""

from __future__ import annotations

from math import floor

import numpy as np

from supertuner.config.settings.data import DatasetSettings
from supertuner.core.types import MediaKind
from supertuner.data.ordering import buckets
from supertuner.data.ordering.buckets import NO_BUCKET, Bucket, Int32Array, SizeRule, frames_available
from supertuner.data.ordering.sample_collection import MediaMetadataSlice

RGB_CHANNELS = 3


def bucket_table(settings: DatasetSettings) -> tuple[Bucket, ...]:
    """Every bucket that the settings allow; `bucket_indices` gives indices into it."""
    kind = settings.dataset_type
    if kind is MediaKind.AUDIO:
        audio, rate = settings.audio, settings.audio.sample_rate
        max_steps = floor(audio.max_seconds / audio.step_seconds + 1e-6)
        lengths = [round(steps * audio.step_seconds * rate) for steps in range(1, max_steps + 1)]
        return tuple(Bucket(kind, samples=n, sample_rate=rate, channels=audio.channels) for n in lengths)
    choices = sorted(settings.frames) if kind is MediaKind.VIDEO else [1]
    return tuple(
        Bucket(kind, width, height, frames, channels=RGB_CHANNELS)
        for table in size_rule(settings).size_tables().values()
        for width, height in table
        for frames in choices
    )


def bucket_indices(settings: DatasetSettings, metadata: MediaMetadataSlice) -> list[Int32Array]:
    """Each sample's index in `bucket_table`, or NO_BUCKET; one array, or one per resolution."""
    if settings.dataset_type is MediaKind.AUDIO:
        audio = settings.audio
        return [buckets.audio_steps(metadata.seconds, audio.step_seconds, audio.max_seconds) - np.int32(1)]
    columns = buckets.size_indices(metadata.width, metadata.height, size_rule(settings))
    if settings.dataset_type is MediaKind.IMAGE:
        return columns
    available = frames_available(metadata.frames, metadata.fps, settings.fps)
    choice, choices = buckets.frame_bucket_indices(available, settings.frames), np.int32(len(settings.frames))
    return [
        np.where((column != NO_BUCKET) & (choice != NO_BUCKET), column * choices + choice, np.int32(NO_BUCKET))
        for column in columns
    ]


def no_bucket_reason(settings: DatasetSettings, metadata: MediaMetadataSlice, row: int) -> str:
    """Why a sample has no bucket, and which setting to change."""
    if settings.dataset_type is MediaKind.AUDIO:
        seconds, step = float(metadata.seconds[row]), settings.audio.step_seconds
        return f"{seconds:.3g} s is shorter than audio.step_seconds {step:g}; lower it to use this file"
    if settings.dataset_type is MediaKind.VIDEO:
        available = int(frames_available(metadata.frames, metadata.fps, settings.fps)[row])
        if available < (smallest := min(settings.frames)):
            rate = "" if settings.fps is None else f" at {settings.fps:g} fps"
            return f"{available} frames{rate} are fewer than the smallest of frames, {smallest}; add a smaller one"
    size = f"{metadata.width[row]}×{metadata.height[row]}"
    return f"{size} is smaller than every bucket (bucket_step {settings.bucket_step}), and upscale is false"


def size_rule(settings: DatasetSettings) -> SizeRule:
    each = settings.resolution_mode == "each"
    return SizeRule(settings.resolution, settings.bucket_step, settings.max_aspect_ratio, settings.upscale, each)
