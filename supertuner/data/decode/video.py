"""Decodes frames of a video, selected by their timestamps, as RGB; decodes no more than the range they span.

PyAV first reads the packets' timestamps, without decoding, so that frames are exact for any constant or variable frame
rate: at a target rate, frame i is the one on screen at time i / rate. Rotation is applied. If the stream does not state
its colour matrix, BT.709 is assumed above 576 lines and BT.601 below, as players do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from supertuner.core.errors import BrokenMediaError
from supertuner.data.decode.image import RGBImage
from supertuner.data.probe.media_info import MAX_PIXELS
from supertuner.data.probe.memoryview_file import open_with_av

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.reformatter import VideoReformatter
    from av.video.stream import VideoStream

MAX_FRAMES = 2_000_000
"""Files with more frames are refused: nine hours at 60 frames per second."""

SD_LINES = 576
_COLORSPACE_UNSPECIFIED = 2
"""AVCOL_SPC_UNSPECIFIED."""


def decode_video(payload: memoryview, first: int, count: int, fps: float | None) -> Iterator[RGBImage]:
    """`count` frames as [H, W, C] from frame `first` on; both count at `fps` (None: the file's own rate)."""
    with open_with_av(payload) as container:
        stream = _video_stream(container)
        timestamps = _read_timestamps(container, stream)
        picks = choose_frames(timestamps.seconds, first, count, fps)
        yield from _decode_frames(container, stream, timestamps, picks)


@dataclass(frozen=True, eq=False, slots=True)
class FrameTimestamps:
    """When each frame is displayed, ascending."""

    seconds: NDArray[np.float64]
    pts: NDArray[np.int64] | None
    """In the stream's time base; None for files without timestamps (such as AVI), whose frames are counted instead."""


def choose_frames(seconds: NDArray[np.float64], first: int, count: int, fps: float | None) -> NDArray[np.int64]:
    """Indices of the frames to decode, ascending; a frame is repeated if `fps` is higher than the file's rate.

    `first` is moved towards the beginning if too few frames follow it, so that a header that states one frame too many
    does no harm. Raises BrokenMediaError if the file has too few frames.
    """
    if fps is None:
        begin = max(0, min(first, len(seconds) - count))
        if begin + count > len(seconds):
            raise BrokenMediaError(f"has {len(seconds)} frames, expected {count}")
        return np.arange(begin, begin + count)
    frame_seconds = (seconds[-1] - seconds[0]) / max(1, len(seconds) - 1)
    available = max(1, int(np.floor((seconds[-1] - seconds[0] + frame_seconds) * fps + 1e-3)))
    if count > available + 1:
        raise BrokenMediaError(f"has {available} frames at {fps:g} fps, expected {count}")
    begin = max(0, min(first, available - count))
    wanted_seconds = seconds[0] + (begin + np.arange(count)) / fps
    picks: NDArray[np.int64] = np.maximum(0, np.searchsorted(seconds, wanted_seconds + 1e-4, side="right") - 1)
    return picks


def _video_stream(container: InputContainer) -> VideoStream:
    if not container.streams.video:
        raise BrokenMediaError("no video stream")
    stream = container.streams.video[0]
    codec: Any = stream.codec_context
    if codec is None:
        raise BrokenMediaError("FFmpeg does not support its codec")
    codec.thread_type, codec.thread_count = "NONE", 1  # samples are decoded in parallel: more threads only compete
    return stream


def _read_timestamps(container: InputContainer, stream: VideoStream) -> FrameTimestamps:
    packet_pts: list[int | None] = []
    for packet in container.demux(stream):
        if packet.size and not packet.is_discard:
            packet_pts.append(packet.pts)
        if len(packet_pts) > MAX_FRAMES:
            raise BrokenMediaError(f"more than {MAX_FRAMES} frames")
    known_pts = [pts for pts in packet_pts if pts is not None]
    if not packet_pts:
        raise BrokenMediaError("no frames")
    if len(known_pts) < len(packet_pts) or not stream.time_base or "avi" in container.format.name:
        if not stream.average_rate:
            raise BrokenMediaError("has neither timestamps nor a frame rate; convert it to an MP4 or MKV container")
        return FrameTimestamps(np.arange(len(packet_pts)) / float(stream.average_rate), None)
    pts = np.unique(np.array(known_pts, np.int64))
    return FrameTimestamps((pts * float(stream.time_base)).astype(np.float64), pts)


def _decode_frames(
    container: InputContainer, stream: VideoStream, timestamps: FrameTimestamps, picks: NDArray[np.int64]
) -> Iterator[RGBImage]:
    """Decode the picked frames: from the key frame before them, or from the beginning if seeking is not possible."""
    from av.video.reformatter import VideoReformatter

    convert = VideoReformatter()
    targets = picks if timestamps.pts is None else timestamps.pts[picks]
    frames = _frames_from(container, stream, timestamps, None if timestamps.pts is None else int(targets[0]))
    number, frame = next(frames, (0, None))
    if frame is None or number > targets[0]:  # the file's index is wrong
        frames = _frames_from(container, stream, timestamps, None)
        number, frame = next(frames, (0, None))
    for target in targets:
        while frame is not None and number < target:
            number, frame = next(frames, (0, None))
        if frame is None:
            raise BrokenMediaError("decoding ends before the last frame that its packets announce")
        yield _to_rgb(frame, convert)


def _frames_from(
    container: InputContainer, stream: VideoStream, timestamps: FrameTimestamps, target: int | None
) -> Iterator[tuple[int, VideoFrame]]:
    """Frames with their timestamps or, without timestamps, their index; from the key frame before `target`, or from the
    beginning if it is None."""
    container.seek(min(0, stream.start_time or 0) if target is None else target, stream=stream, backward=True)
    for count, frame in enumerate(container.decode(stream)):
        if timestamps.pts is None:
            yield count, frame
        elif frame.pts is not None:
            yield frame.pts, frame


def _to_rgb(frame: VideoFrame, convert: VideoReformatter) -> RGBImage:
    if frame.width * frame.height > MAX_PIXELS:
        raise BrokenMediaError(f"a frame of {frame.width}×{frame.height} pixels")
    if frame.is_corrupt:
        raise BrokenMediaError("a damaged frame")
    converted = convert.reformat(frame, format="rgb24", src_colorspace=_source_colorspace(frame))
    image = converted.to_ndarray().astype(np.uint8, copy=False)
    quarter_turns = round(frame.rotation / 90)
    return np.ascontiguousarray(np.rot90(image, quarter_turns)) if quarter_turns % 4 else image


def _source_colorspace(frame: VideoFrame) -> int | None:
    from av.video.reformatter import Colorspace

    if frame.colorspace != _COLORSPACE_UNSPECIFIED:
        return None
    return int(Colorspace.ITU709 if frame.height > SD_LINES else Colorspace.ITU601)
