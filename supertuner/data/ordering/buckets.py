"""Buckets: the shapes that samples are resized to, and which shape a sample of a given size gets. Pure.

Aspect ratios are compared with IEEE divisions and square roots, which round identically everywhere, so a sample's
bucket does not depend on the machine, on the other samples, or on their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

import numpy as np
from numpy.typing import NDArray

from supertuner.core.types import MediaKind

Int32Array = NDArray[np.int32]

NO_BUCKET = -1
"""In an array of bucket indices: this sample fits no bucket."""

AREA_TOLERANCE = Fraction(1, 5)
"""How far a bucket's area may differ from resolution², relatively. With sides of only a few steps, some aspect ratios
have no size of about the right area."""

LADDER_RATIO = Fraction(7, 8)
"""Without upscaling, each resolution of the ladder is about this fraction of the one before."""

FRAME_TOLERANCE = 1e-3
"""In frames: 80.9999 frames count as 81, because headers round the frame rate."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The shape of a sample. Fields that have no meaning for its kind are 0."""

    kind: MediaKind
    width: int = 0
    height: int = 0
    frames: int = 0
    samples: int = 0
    """Audio: samples per channel."""
    sample_rate: int = 0
    channels: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample: [C, H, W], [C, F, H, W] or [C, T]."""
        if self.kind is MediaKind.AUDIO:
            return (self.channels, self.samples)
        if self.kind is MediaKind.VIDEO:
            return (self.channels, self.frames, self.height, self.width)
        return (self.channels, self.height, self.width)

    @property
    def label(self) -> str:
        if self.kind is MediaKind.AUDIO:
            seconds = self.samples / self.sample_rate
            return f"audio {seconds:g} s, {self.sample_rate / 1000:g} kHz, {self.channels} ch"
        size = f"{self.kind} {self.width}×{self.height}"
        return f"{size}, {self.frames} frames" if self.kind is MediaKind.VIDEO else size


def bucket_sizes(resolution: int, step: int, max_ratio: float) -> tuple[tuple[int, int], ...]:
    """Width and height of the buckets of one resolution, from the tallest to the widest.

    Sides are multiples of `step`. For every width there is the height that brings the area closest to resolution², and
    vice versa, if the area is within AREA_TOLERANCE. The square is always included.
    """
    square = max(1, _round_half_up(Fraction(resolution, step)))
    sizes_in_steps = {(square, square)}
    for across in range(1, ceil(resolution * max(1.0, max_ratio) / step) + 1):
        down = max(1, _round_half_up(Fraction(resolution * resolution, across * step * step)))
        is_close = abs(Fraction(across * down * step * step, resolution * resolution) - 1) <= AREA_TOLERANCE
        if is_close and max(across, down) <= max_ratio * min(across, down):
            sizes_in_steps |= {(across, down), (down, across)}
    by_ratio = sorted(sizes_in_steps, key=lambda size: (Fraction(*size), size))
    return tuple((width * step, height * step) for width, height in by_ratio)


def resolution_ladder(resolutions: Sequence[int], step: int, upscale: bool) -> tuple[int, ...]:
    """Resolutions to try, largest first: the requested ones and, without upscaling, also smaller ones."""
    rungs = set(resolutions)
    next_rung = Fraction(min(resolutions))
    while not upscale and next_rung > step:
        next_rung *= LADDER_RATIO
        rungs.add(max(1, _round_half_up(next_rung / step)) * step)
    return tuple(sorted(rungs, reverse=True))


def nearest_size(width: Int32Array, height: Int32Array, table: Sequence[tuple[int, int]]) -> Int32Array:
    """For each sample the index of the size with the nearest aspect ratio (by logarithm); in a tie, the taller one.

    Among sizes with equal aspect ratio, the larger one.
    """
    ratios = np.array([w / h for w, h in table])
    keep = np.array([i for i in range(len(table)) if i + 1 == len(table) or ratios[i] != ratios[i + 1]])
    borders = np.sqrt(ratios[keep][:-1] * ratios[keep][1:])
    return keep[np.searchsorted(borders, width / height, side="left")].astype(np.int32)


@dataclass(frozen=True, slots=True)
class SizeRule:
    """The settings that determine the width and height of a dataset's samples."""

    resolutions: tuple[int, ...]
    step: int
    max_ratio: float
    upscale: bool
    every_resolution: bool
    """Whether a sample is used at every resolution instead of only at the best one."""

    def size_tables(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """The sizes of each resolution, largest resolution first. Size indices count through all tables."""
        rungs = resolution_ladder(self.resolutions, self.step, self.upscale)
        return {rung: bucket_sizes(rung, self.step, self.max_ratio) for rung in rungs}


def size_indices(width: Int32Array, height: Int32Array, rule: SizeRule) -> list[Int32Array]:
    """Each sample's index in the rule's tables: at the best resolution, or one array per requested resolution.

    The best resolution is the largest one that the sample covers without upscaling, else the smallest. Without
    upscaling, the ladder continues below the smallest requested resolution down to `step`; a sample with a side shorter
    than `step` fits no bucket.
    """
    tables = rule.size_tables()
    begin, smallest_rung = 0, min(tables)
    best = np.full(len(width), NO_BUCKET, np.int32)
    columns: list[Int32Array] = []
    for rung, table in tables.items():
        is_requested = rule.every_resolution and rung in rule.resolutions
        rows = np.arange(len(width)) if is_requested else np.flatnonzero(best == NO_BUCKET)
        nearest = nearest_size(width[rows], height[rows], table)
        size = np.array(table, np.int32)[nearest]
        fits = (width[rows] >= size[:, 0]) & (height[rows] >= size[:, 1])  # without upscaling
        if rule.upscale and (is_requested or rung == smallest_rung):
            fits[:] = True
        size_index = np.where(fits, nearest + np.int32(begin), np.int32(NO_BUCKET)).astype(np.int32)
        best[rows] = np.where(best[rows] == NO_BUCKET, size_index, best[rows])
        if is_requested:
            columns.append(size_index)
        begin += len(table)
    if not rule.every_resolution:
        return [best]
    # a sample that fits no requested resolution is used once, at the best one below them
    unassigned = np.all([column == NO_BUCKET for column in columns], axis=0)
    return [*columns[:-1], np.where(unassigned, best, columns[-1])]


def frames_available(frames: Int32Array, fps: NDArray[np.float32], target_fps: float | None) -> NDArray[np.int64]:
    """Frames that a clip has at `target_fps`; a clip of unknown frame rate keeps its frames."""
    if target_fps is None:
        return frames.astype(np.int64)
    rate = np.where(fps > 0, target_fps / np.where(fps > 0, fps, 1).astype(np.float64), 1.0)
    whole_frames: NDArray[np.int64] = np.floor(frames * rate + FRAME_TOLERANCE).astype(np.int64)
    return whole_frames


def frame_bucket_indices(available: NDArray[np.int64], choices: Sequence[int]) -> Int32Array:
    """Index, in sorted `choices`, of the largest one that a clip can fill; NO_BUCKET if it is too short for all."""
    return (np.searchsorted(np.array(sorted(choices)), available, side="right") - 1).astype(np.int32)


def audio_steps(seconds: NDArray[np.float32], step_seconds: float, max_seconds: float) -> Int32Array:
    """Whole steps that each audio file fills, limited to those in max_seconds; 0 if it is too short for one."""
    max_steps = floor(max_seconds / step_seconds + 1e-6)
    steps: Int32Array = np.minimum(np.floor(seconds / step_seconds + 1e-4), max_steps).astype(np.int32)
    return steps


def _round_half_up(value: Fraction) -> int:
    return floor(value + Fraction(1, 2))
