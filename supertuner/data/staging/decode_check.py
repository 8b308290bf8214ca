"""Whether a file decodes from its first byte to its last: the thorough check, for `check: "decode"`.

Pictures and video go through the decoders that training uses, so that what passes here cannot fail there; sound is
decoded in blocks, because only its completeness matters here and a long one would fill memory.
"""

from __future__ import annotations

from supertuner.core.errors import BrokenMediaError
from supertuner.core.types import MediaKind
from supertuner.data.probe.media_info import MediaInfo
from supertuner.data.probe.memoryview_file import MemoryviewFile

_BLOCK_FRAMES = 1 << 16
_MIN_COMPLETE_SHARE = 0.99
"""Lossy codecs count their padding differently."""


def require_decodes(payload: memoryview, info: MediaInfo, kind: MediaKind) -> None:
    """BrokenMedia if any part of the file cannot be decoded. Costs as much as decoding it for training."""
    decode = {MediaKind.IMAGE: _check_image, MediaKind.VIDEO: _check_video, MediaKind.AUDIO: _check_audio}[kind]
    try:
        decode(payload, info)
    except BrokenMediaError as error:
        raise BrokenMediaError(f"does not decode: {error}") from error
    except Exception as error:  # decoders raise dozens of types on damaged bytes; all mean the same here
        raise BrokenMediaError(f"does not decode ({type(error).__name__}: {error})") from error


def _check_image(payload: memoryview, info: MediaInfo) -> None:
    from supertuner.data.decode.image import decode_image

    decode_image(payload)


def _check_video(payload: memoryview, info: MediaInfo) -> None:
    from supertuner.data.decode.video import decode_video

    decoded = sum(1 for _ in decode_video(payload, 0, info.frames, None))
    if decoded < info.frames:
        raise BrokenMediaError(f"{decoded} of {info.frames} pictures")


def _check_audio(payload: memoryview, info: MediaInfo) -> None:
    if info.format in ("mp4", "matroska", "aac"):
        decoded = _count_audio_with_av(payload)
    else:
        import soundfile

        with soundfile.SoundFile(MemoryviewFile(payload)) as sound:
            decoded = sum(len(block) for block in sound.blocks(_BLOCK_FRAMES, dtype="float32"))
    if decoded < info.frames * _MIN_COMPLETE_SHARE:
        raise BrokenMediaError(f"{decoded} of {info.frames} samples")


def _count_audio_with_av(payload: memoryview) -> int:
    import av

    with av.open(MemoryviewFile(payload), mode="r", metadata_errors="replace") as container:
        return sum(frame.samples for frame in container.decode(container.streams.audio[0]))
