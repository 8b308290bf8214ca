"""Size, length and completeness of a video: counts its packets and decodes only its first frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from supertuner.core.errors import BrokenMediaError
from supertuner.data.probe.container import require_complete
from supertuner.data.probe.media_info import MediaInfo, image_info
from supertuner.data.probe.memoryview_file import open_with_av

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

_MIN_COMPLETE_SHARE = 0.95
"""Matroska states the duration and not the number of frames: a file with less than this share of it is truncated."""


def probe_video(format: str, payload: memoryview) -> MediaInfo:
    """Metadata of a complete video file. Raises BrokenMediaError if it is not complete or not readable."""
    import av

    require_complete(format, payload)
    try:
        with open_with_av(payload) as container:
            return _probe_container(format, container)
    except av.FFmpegError as error:
        raise BrokenMediaError(f"not a readable video: {error.strerror}") from error


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
    """Rotation of the first frame for display, in degrees. Raises BrokenMediaError if it does not decode."""
    for frame in container.decode(stream):
        return int(frame.rotation)
    raise BrokenMediaError("a video without frames")


def _count_packets(container: InputContainer, stream: VideoStream) -> tuple[int, float]:
    """Number of frames in the file, and the time in seconds at which the last one ends."""
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
        raise BrokenMediaError(f"truncated: its header states {stream.frames} frames, the file contains {frames}")
    stated_s = (container.duration or 0) / 1e6
    others_end_s = stated_s if len(container.streams) > 1 else end_s  # audio may be longer than the video
    if not stream.frames and max(end_s, others_end_s) < stated_s * _MIN_COMPLETE_SHARE:
        raise BrokenMediaError(f"truncated: its header states {stated_s:.2f} s, the file contains {end_s:.2f} s")
