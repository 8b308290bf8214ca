"""Size, length and completeness of a video: its packets are counted, its first picture is decoded, no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from supertuner.core.errors import BrokenMediaError
from supertuner.data.probe.container import require_complete
from supertuner.data.probe.media_info import MediaInfo, image_info
from supertuner.data.probe.memoryview_file import MemoryviewFile

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

_MIN_COMPLETE_SHARE = 0.95
"""Matroska states a length in time and not in pictures: less than this share of it is a truncated file."""


def probe_video(format: str, payload: memoryview) -> MediaInfo:
    """Facts of a whole video file; BrokenMedia says what is wrong with it."""
    import av

    require_complete(format, payload)
    try:
        with av.open(MemoryviewFile(payload), mode="r", metadata_errors="replace") as container:
            return _probe_container(format, container)
    except av.FFmpegError as error:
        raise BrokenMediaError(f"not a video that can be read: {error.strerror}") from error


def _probe_container(format: str, container: InputContainer) -> MediaInfo:
    if not container.streams.video:
        raise BrokenMediaError(f"{format} without a video stream")
    stream = container.streams.video[0]
    rotation = _first_frame_rotation(container, stream)
    frames, end_s = _count_packets(container, stream)
    _require_all_frames(container, stream, frames, end_s)
    fps = float(stream.average_rate or 0)
    seconds = frames / fps if fps else end_s
    width, height = stream.codec_context.width, stream.codec_context.height
    info = image_info(format, width, height, 1)
    if rotation % 180:
        info = info._replace(width=height, height=width)
    return info._replace(frames=frames, fps=fps, seconds=seconds)


def _first_frame_rotation(container: InputContainer, stream: VideoStream) -> int:
    """Degrees by which the first picture is turned for display; that it decodes at all is part of the check."""
    for frame in container.decode(stream):
        return int(frame.rotation)
    raise BrokenMediaError("a video without a picture")


def _count_packets(container: InputContainer, stream: VideoStream) -> tuple[int, float]:
    """Number of pictures in the file, and the time at which the last one ends."""
    container.seek(0)
    count, end = 0, 0
    for packet in container.demux(stream):
        if not packet.size:
            continue
        count += 1
        if packet.pts is not None:
            end = max(end, packet.pts + (packet.duration or 0))
    return count, float(end * stream.time_base) if stream.time_base else 0.0


def _require_all_frames(container: InputContainer, stream: VideoStream, frames: int, end_s: float) -> None:
    if stream.frames and frames < stream.frames:
        raise BrokenMediaError(f"truncated: {stream.frames} pictures by its header, {frames} in the file")
    stated_s = (container.duration or 0) / 1e6
    others_end_s = stated_s if len(container.streams) > 1 else end_s  # sound may rightly be longer than the pictures
    if not stream.frames and max(end_s, others_end_s) < stated_s * _MIN_COMPLETE_SHARE:
        raise BrokenMediaError(f"truncated: {stated_s:.2f} s by its header, {end_s:.2f} s in the file")
