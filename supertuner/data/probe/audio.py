"""Rate, channels, length and completeness of a sound file; its last sample is read, the rest is not decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from supertuner.core.errors import BrokenMedia
from supertuner.data.probe.container import require_whole
from supertuner.data.probe.facts import Facts
from supertuner.data.probe.window import Window

if TYPE_CHECKING:
    import soundfile

MOST_FRAMES = (1 << 31) - 1
"""Columns count samples in 32 bits; a sound that has more is told by its seconds."""
MAX_SECONDS = 24 * 3600.0
"""Longer sounds are refused: a small file that claims more is a bomb, or not a training sample."""


def facts(format: str, payload: memoryview) -> Facts:
    """Facts of a whole sound file; BrokenMedia says what is wrong with it."""
    require_whole(format, payload)
    found = _by_av(format, payload) if format in ("mp4", "matroska", "aac") else _by_soundfile(format, payload)
    if not (found.frames and found.channels and found.sample_rate):
        raise BrokenMedia("holds no sound")
    if found.seconds > MAX_SECONDS:
        raise BrokenMedia(f"would decode to {found.seconds:.0f} s of sound, more than {MAX_SECONDS:.0f}")
    return found._replace(frames=min(found.frames, MOST_FRAMES))


def _by_soundfile(format: str, payload: memoryview) -> Facts:
    import soundfile

    try:
        with soundfile.SoundFile(Window(payload)) as sound:
            if format == "flac":
                _require_last(sound)
            rate = sound.samplerate
            return Facts(
                format, frames=sound.frames, seconds=sound.frames / rate, sample_rate=rate, channels=sound.channels
            )
    except soundfile.LibsndfileError as error:
        raise BrokenMedia(f"not a sound that can be read: {error.error_string}") from error


def _require_last(sound: soundfile.SoundFile) -> None:
    """A FLAC header states the length, so the last sample tells whether all is there."""
    import soundfile

    try:
        sound.seek(max(0, sound.frames - 1))
        found = len(sound.read(1))
    except soundfile.LibsndfileError:
        found = 0
    if sound.frames and not found:
        raise BrokenMedia(f"truncated: {sound.frames} samples by its header, and the last one is missing")


def _by_av(format: str, payload: memoryview) -> Facts:
    import av

    try:
        with av.open(Window(payload), mode="r", metadata_errors="replace") as container:
            if not container.streams.audio:
                raise BrokenMedia(f"{format} without a sound stream")
            stream = container.streams.audio[0]
            rate, channels = stream.codec_context.sample_rate, stream.codec_context.channels
            end = 0.0
            for packet in container.demux(stream):
                if packet.size and packet.pts is not None and packet.time_base:
                    end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
    except av.FFmpegError as error:
        raise BrokenMedia(f"not a sound that can be read: {error.strerror}") from error
    return Facts(format, frames=round(end * rate), seconds=end, sample_rate=rate, channels=channels)
