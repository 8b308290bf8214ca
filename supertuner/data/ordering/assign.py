"""From a dataset's settings to its table of buckets, and from its samples' measures to their numbers in it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from supertuner.config.settings.data import Dataset
from supertuner.core.types import MediaKind
from supertuner.data.ordering.buckets import (
    NO_BUCKET,
    Bucket,
    Ints,
    SizeRule,
    audio_steps,
    frame_bucket,
    frames_available,
    size_numbers,
)

COLOURS = 3


class Measures(Protocol):
    """What is known of samples before they are decoded, one array each; 0 where it has no meaning."""

    @property
    def width(self) -> Ints: ...
    @property
    def height(self) -> Ints: ...
    @property
    def frames(self) -> Ints: ...
    @property
    def fps(self) -> NDArray[np.float32]: ...
    @property
    def seconds(self) -> NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class Block:
    """The measures of some neighbouring samples."""

    width: Ints
    height: Ints
    frames: Ints
    fps: NDArray[np.float32]
    seconds: NDArray[np.float32]


def block_of(measures: Measures, begin: int, end: int) -> Block:
    part = slice(begin, end)
    return Block(
        measures.width[part],
        measures.height[part],
        measures.frames[part],
        measures.fps[part],
        measures.seconds[part],
    )


def bucket_table(settings: Dataset) -> tuple[Bucket, ...]:
    """Every bucket that the settings allow; `bucket_numbers` counts through it."""
    kind = settings.dataset_type
    if kind is MediaKind.AUDIO:
        sound = settings.audio
        most = floor(sound.max_seconds / sound.step_seconds + 1e-6)
        lengths = (round(steps * sound.step_seconds * sound.sample_rate) for steps in range(1, most + 1))
        return tuple(
            Bucket(kind, samples=length, sample_rate=sound.sample_rate, channels=sound.channels) for length in lengths
        )
    choices = sorted(settings.frames) if kind is MediaKind.VIDEO else [1]
    return tuple(
        Bucket(kind, width, height, frames, channels=COLOURS)
        for table in size_rule(settings).tables().values()
        for width, height in table
        for frames in choices
    )


def bucket_numbers(settings: Dataset, block: Block) -> list[Ints]:
    """Each sample's number in `bucket_table`, or NO_BUCKET; one column, or one for each resolution."""
    if settings.dataset_type is MediaKind.AUDIO:
        return [audio_steps(block.seconds, settings.audio.step_seconds, settings.audio.max_seconds) - np.int32(1)]
    columns = size_numbers(block.width, block.height, size_rule(settings))
    if settings.dataset_type is MediaKind.IMAGE:
        return columns
    available = frames_available(block.frames, block.fps, settings.fps)
    choice = frame_bucket(available, settings.frames)
    fits = [(column != NO_BUCKET) & (choice != NO_BUCKET) for column in columns]
    several = np.int32(len(settings.frames))
    return [
        np.where(fit, column * several + choice, np.int32(NO_BUCKET)) for fit, column in zip(fits, columns, strict=True)
    ]


def why_none(settings: Dataset, block: Block, row: int) -> str:
    """Why a sample has no bucket, in words that say what to change."""
    if settings.dataset_type is MediaKind.AUDIO:
        seconds, step = float(block.seconds[row]), settings.audio.step_seconds
        return f"{seconds:.3g} s is shorter than audio.step_seconds {step:g}; lower it to use the sound"
    if settings.dataset_type is MediaKind.VIDEO:
        available = int(frames_available(block.frames, block.fps, settings.fps)[row])
        if available < min(settings.frames):
            rate = "" if settings.fps is None else f" at {settings.fps:g} fps"
            return (
                f"{available} frames{rate} are fewer than the smallest of frames, {min(settings.frames)}; add a smaller"
            )
    size = f"{block.width[row]}×{block.height[row]}"
    return f"{size} fills no bucket (bucket_step {settings.bucket_step}), and upscale is false"


def size_rule(settings: Dataset) -> SizeRule:
    return SizeRule(
        settings.resolution,
        settings.bucket_step,
        settings.max_aspect_ratio,
        settings.upscale,
        settings.resolution_mode == "each",
    )
