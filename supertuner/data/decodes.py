"""Whether a file decodes from its first byte to its last: the thorough check, for `check: "decode"`."""

from __future__ import annotations

import io

from supertuner.core.errors import BrokenMedia
from supertuner.core.types import MediaKind
from supertuner.data.probe.facts import Facts
from supertuner.data.probe.window import Window


def require_decodes(payload: memoryview, facts: Facts, kind: MediaKind) -> None:
    """BrokenMedia if any part of the file cannot be decoded. Costs as much as decoding it for training."""
    {MediaKind.IMAGE: _image, MediaKind.VIDEO: _video, MediaKind.AUDIO: _audio}[kind](payload, facts)


def _image(payload: memoryview, facts: Facts) -> None:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BufferedReader(Window(payload))) as picture:
            picture.load()
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError) as error:  # what Pillow's plugins raise
        raise BrokenMedia(f"does not decode: {error}") from error


def _video(payload: memoryview, facts: Facts) -> None:
    import av

    try:
        with av.open(Window(payload), mode="r", metadata_errors="replace") as container:
            stream = container.streams.video[0]
            stream.thread_count = 1
            frames = sum(1 for _ in container.decode(stream))
    except av.FFmpegError as error:
        raise BrokenMedia(f"does not decode: {error.strerror}") from error
    if frames < facts.frames:
        raise BrokenMedia(f"does not decode: {frames} of {facts.frames} pictures")


def _audio(payload: memoryview, facts: Facts) -> None:
    if facts.format in ("mp4", "matroska", "aac"):
        _audio_by_av(payload)
        return
    import soundfile

    try:
        with soundfile.SoundFile(Window(payload)) as sound:
            decoded = sum(len(block) for block in sound.blocks(1 << 16, dtype="float32"))
    except soundfile.LibsndfileError as error:
        raise BrokenMedia(f"does not decode: {error.error_string}") from error
    if decoded < facts.frames * 0.99:  # lossy codecs count their padding differently
        raise BrokenMedia(f"does not decode: {decoded} of {facts.frames} samples")


def _audio_by_av(payload: memoryview) -> None:
    import av

    try:
        with av.open(Window(payload), mode="r", metadata_errors="replace") as container:
            for _ in container.decode(container.streams.audio[0]):
                pass
    except av.FFmpegError as error:
        raise BrokenMedia(f"does not decode: {error.strerror}") from error
