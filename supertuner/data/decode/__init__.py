"""Decodes images, video and audio from a file's bytes, one module per kind; damaged bytes raise BrokenMediaError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from supertuner.core.errors import BrokenMediaError
from supertuner.core.types import MediaKind
from supertuner.data.decode.decode_memory import VIDEO_BYTES_PER_PIXEL, DecodeMemory
from supertuner.data.probe.media_info import AV_AUDIO_FORMATS, MediaInfo
from supertuner.data.probe.memoryview_file import MemoryviewFile, open_with_av

_BLOCK_FRAMES = 1 << 16
_MIN_COMPLETE_SHARE = 0.99
"""Lossy audio codecs count their padding differently."""


@contextmanager
def raising_broken_media(label: str) -> Iterator[None]:
    """Convert every exception inside into a BrokenMediaError whose message begins with `label`.

    Decoders raise dozens of exception types for damaged bytes, struct.error and MemoryError among them. Their types
    add nothing to their messages, and the original exception stays attached as the cause.
    """
    try:
        yield
    except BrokenMediaError as error:
        raise BrokenMediaError(f"{label}: {error}") from error
    except Exception as error:
        raise BrokenMediaError(f"{label}: cannot be decoded ({type(error).__name__}: {error})") from error


def require_decodes(payload: memoryview, info: MediaInfo, kind: MediaKind, memory: DecodeMemory) -> None:
    """Raise BrokenMediaError if any part of the file does not decode: the thorough check of `check: "decode"`.

    Takes as long as decoding the file for training. Images and video go through the decoders that training uses, so a
    file that passes here cannot fail there. Audio is decoded in blocks, because only its completeness matters here and
    a long file would fill memory. Decoding waits until `memory`, which threads share, admits the file.
    """
    try:
        if kind is MediaKind.IMAGE:
            from supertuner.data.decode.image import EncodedImage

            image = EncodedImage.open(payload)
            with memory.reserve(image.peak_bytes()):
                image.decode()
        elif kind is MediaKind.VIDEO:
            with memory.reserve(VIDEO_BYTES_PER_PIXEL * info.width * info.height):
                _check_video(payload, info)
        else:
            _check_audio(payload, info)
    except BrokenMediaError as error:
        raise BrokenMediaError(f"does not decode: {error}") from error
    except Exception as error:  # decoders raise dozens of types for damaged bytes; all mean the same here
        raise BrokenMediaError(f"does not decode ({type(error).__name__}: {error})") from error


def _check_video(payload: memoryview, info: MediaInfo) -> None:
    from supertuner.data.decode.video import decode_video

    decoded = sum(1 for _ in decode_video(payload, 0, info.frames, None))
    if decoded < info.frames:
        raise BrokenMediaError(f"only {decoded} of {info.frames} frames")


def _check_audio(payload: memoryview, info: MediaInfo) -> None:
    if info.format in AV_AUDIO_FORMATS:
        with open_with_av(payload) as container:
            decoded = sum(frame.samples for frame in container.decode(container.streams.audio[0]))
    else:
        import soundfile

        with soundfile.SoundFile(MemoryviewFile(payload)) as sound:
            decoded = sum(len(block) for block in sound.blocks(_BLOCK_FRAMES, dtype="float32"))
    if decoded < info.frames * _MIN_COMPLETE_SHARE:
        raise BrokenMediaError(f"only {decoded} of {info.frames} samples")
