"""Sample rate, channels, length and completeness of an audio file; decodes at most its last sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from supertuner.core.errors import BrokenMediaError
from supertuner.data.probe.container import require_complete
from supertuner.data.probe.media_info import AV_AUDIO_FORMATS, MediaInfo
from supertuner.data.probe.memoryview_file import MemoryviewFile, open_with_av

if TYPE_CHECKING:
    import soundfile

MAX_FRAMES = (1 << 31) - 1
"""Columns store the number of samples in 32 bits. Longer audio is limited to this number; its seconds are exact."""
MAX_SECONDS = 24 * 3600.0
"""Longer audio is refused: a small file that claims more is a decompression bomb, or not a training sample."""


def probe_audio(format: str, payload: memoryview) -> MediaInfo:
    """Metadata of a complete audio file. Raises BrokenMediaError if it is not complete or not readable."""
    require_complete(format, payload)
    info = (_probe_with_av if format in AV_AUDIO_FORMATS else _probe_with_soundfile)(format, payload)
    if not (info.frames and info.channels and info.sample_rate):
        raise BrokenMediaError("contains no audio")
    if info.seconds > MAX_SECONDS:
        raise BrokenMediaError(f"would decode to {info.seconds:.0f} s of audio, more than {MAX_SECONDS:.0f} s")
    return info._replace(frames=min(info.frames, MAX_FRAMES))


def _probe_with_soundfile(format: str, payload: memoryview) -> MediaInfo:
    import soundfile

    try:
        with soundfile.SoundFile(MemoryviewFile(payload)) as sound:
            if format == "flac":
                _require_last_sample(sound)
            frames, rate = sound.frames, sound.samplerate
            return MediaInfo(format, frames=frames, seconds=frames / rate, sample_rate=rate, channels=sound.channels)
    except soundfile.LibsndfileError as error:
        raise BrokenMediaError(f"not a readable audio file: {error.error_string}") from error


def _require_last_sample(sound: soundfile.SoundFile) -> None:
    """A FLAC header states the length, so the file is complete if the last sample can be read."""
    import soundfile

    try:
        sound.seek(max(0, sound.frames - 1))
        samples_read = len(sound.read(1))
    except soundfile.LibsndfileError:
        samples_read = 0
    if sound.frames and not samples_read:
        raise BrokenMediaError(f"truncated: its header states {sound.frames} samples, and the last one is missing")


def _probe_with_av(format: str, payload: memoryview) -> MediaInfo:
    import av

    try:
        with open_with_av(payload) as container:
            if not container.streams.audio:
                raise BrokenMediaError(f"{format} without an audio stream")
            stream = container.streams.audio[0]
            rate, channels = stream.codec_context.sample_rate, stream.codec_context.channels
            end = 0.0
            for packet in container.demux(stream):
                if packet.size and packet.pts is not None and packet.time_base:
                    end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
    except av.FFmpegError as error:
        raise BrokenMediaError(f"not a readable audio file: {error.strerror}") from error
    return MediaInfo(format, frames=round(end * rate), seconds=end, sample_rate=rate, channels=channels)
