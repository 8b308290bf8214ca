"""Whether a file decodes from its first byte to its last: the thorough check, for `check: "decode"`.

Pictures and video go through the decoders that training uses, so that what passes here cannot fail there; sound is
decoded in blocks, because only its completeness matters here and a long one would fill memory.
"""

from __future__ import annotations

from supertuner.core.errors import BrokenMedia
from supertuner.core.types import MediaKind
from supertuner.data.probe.facts import Facts
from supertuner.data.probe.window import Window

_BLOCK_FRAMES = 1 << 16
_WHOLE_SHARE = 0.99
"""Lossy codecs count their padding differently."""


def require_decodes(payload: memoryview, facts: Facts, kind: MediaKind) -> None:
    """BrokenMedia if any part of the file cannot be decoded. Costs as much as decoding it for training."""
    decode = {MediaKind.IMAGE: _image, MediaKind.VIDEO: _video, MediaKind.AUDIO: _audio}[kind]
    try:
        decode(payload, facts)
    except BrokenMedia as error:
        raise BrokenMedia(f"does not decode: {error}") from error
    except Exception as error:  # decoders raise dozens of types on damaged bytes; all mean the same here
        raise BrokenMedia(f"does not decode ({type(error).__name__}: {error})") from error


def _image(payload: memoryview, facts: Facts) -> None:
    from supertuner.data.decode.image import decode_image

    decode_image(payload)


def _video(payload: memoryview, facts: Facts) -> None:
    from supertuner.data.decode.video import decode_video

    decoded = sum(1 for _ in decode_video(payload, 0, facts.frames, None))
    if decoded < facts.frames:
        raise BrokenMedia(f"{decoded} of {facts.frames} pictures")


def _audio(payload: memoryview, facts: Facts) -> None:
    if facts.format in ("mp4", "matroska", "aac"):
        decoded = _audio_by_av(payload)
    else:
        import soundfile

        with soundfile.SoundFile(Window(payload)) as sound:
            decoded = sum(len(block) for block in sound.blocks(_BLOCK_FRAMES, dtype="float32"))
    if decoded < facts.frames * _WHOLE_SHARE:
        raise BrokenMedia(f"{decoded} of {facts.frames} samples")


def _audio_by_av(payload: memoryview) -> int:
    import av

    with av.open(Window(payload), mode="r", metadata_errors="replace") as container:
        return sum(frame.samples for frame in container.decode(container.streams.audio[0]))
