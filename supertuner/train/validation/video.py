"""Encodes frames as MP4 (H.264, as browsers play it). Single-threaded, without timestamps of the encoding: equal frames
give equal bytes."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from io import BytesIO
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from supertuner.core.errors import TrainError

ENCODERS = ("libx264", "libopenh264", "mpeg4")
"""The first one that PyAV's FFmpeg has is used; PyAV's wheels have all but the second."""
ENCODER_OPTIONS = {
    # Without mbtree: for images below 64 pixels it reads uninitialised memory, and the bytes differ.
    "libx264": {"crf": "12", "preset": "medium", "x264-params": "mbtree=0"},
    "libopenh264": {"b": "20000000"},
    "mpeg4": {"qscale": "2"},
}
BT709 = 1
"""Colour matrix, primaries and transfer of ITU-R BT.709 in FFmpeg's numbering."""


def select_encoder() -> str:
    """The encoder to use here; TrainError if there is none."""
    from av.codec import Codec
    from av.codec.codec import UnknownCodecError

    for name in ENCODERS:
        try:
            Codec(name, "w")
        except UnknownCodecError:
            continue  # not in this build; try the next
        return name
    raise TrainError(f"PyAV has none of the video encoders {', '.join(ENCODERS)}; install PyAV from its wheel")


def mp4_bytes(frames_HWC: Iterable[NDArray[np.uint8]], fps: float) -> bytes:
    """The clip as an MP4 file. An odd width or height grows by one pixel: H.264 stores colours at half resolution."""
    import av
    from av.codec.context import Flags

    pictures = map(_pad_to_even, frames_HWC)
    first = next(pictures)
    name = select_encoder()
    rate = Fraction(fps).limit_denominator(1001)
    out = BytesIO()
    with av.open(out, mode="w", format="mp4", options={"fflags": "+bitexact"}) as container:
        stream: Any = container.add_stream(name, rate=rate, options=ENCODER_OPTIONS[name])
        stream.width, stream.height, stream.pix_fmt = first.shape[1], first.shape[0], "yuv420p"
        context = stream.codec_context
        context.thread_count, context.thread_type = 1, "NONE"
        context.flags |= int(Flags.bitexact)
        context.colorspace = context.color_primaries = context.color_trc = BT709
        for number, picture in enumerate(chain((first,), pictures)):
            frame = _to_yuv(picture)
            frame.pts, frame.time_base = number, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


def first_middle_last(frames_FHWC: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """Up to three frames that represent a clip in an image."""
    last = len(frames_FHWC) - 1
    return [frames_FHWC[number] for number in sorted({0, last // 2, last})]


def _to_yuv(picture_HWC: NDArray[np.uint8]) -> Any:
    from av import VideoFrame
    from av.video.reformatter import Colorspace

    frame = VideoFrame.from_ndarray(np.ascontiguousarray(picture_HWC), format="rgb24")
    converted = frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709)
    converted.colorspace = BT709
    return converted


def _pad_to_even(picture_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pad to even sides by repeating the last row and column."""
    height, width, _ = picture_HWC.shape
    return np.pad(picture_HWC, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
