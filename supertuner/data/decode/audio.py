"""Sound: the wanted stretch of a file as float32, channels first, at the wanted rate and number of channels.

WAV, FLAC, Ogg and MP3 go through libsndfile, which reads only the stretch and is the faster one where it matters (WAV:
7 times), the rest through PyAV. Rates are changed by FFmpeg's resampler. One channel is copied to all that are wanted,
several become one by their mean, and of more than are wanted the first are taken.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from supertuner.core.errors import BrokenMedia
from supertuner.data.probe.audio import MAX_SECONDS
from supertuner.data.probe.sniff import HEAD_BYTES, sniff
from supertuner.data.probe.window import Window

Sound = NDArray[np.float32]

BEFORE_S, AFTER_S = 0.25, 0.05
"""Read around the stretch and cut off again: a resampler's filter then meets sound and not silence at the edges, and
MP3, whose frames borrow from earlier ones, has recovered from the jump."""

SLACK_S = 0.1
"""A stretch that ends so much early is filled with silence: codecs pad and cut a few milliseconds."""


def decode_audio(payload: memoryview, begin_s: float, samples: int, rate: int, channels: int) -> Sound:
    """`samples` of sound at `rate`, from `begin_s` on, as channels × samples."""
    before = min(begin_s, BEFORE_S)
    read_s = before + samples / rate + AFTER_S
    by_av = sniff(bytes(payload[:HEAD_BYTES])) in ("mp4", "matroska", "aac")
    stretch, file_rate = (_by_av if by_av else _by_soundfile)(payload, begin_s - before, read_s)
    sound = resampled(mixed(stretch, channels), file_rate, rate)
    skip = round(before * rate)
    sound = sound[:, skip : skip + samples]
    missing = samples - sound.shape[1]
    if missing > SLACK_S * rate:
        raise BrokenMedia(f"ends {missing / rate:.2f} s before the length that its header states")
    return np.ascontiguousarray(np.pad(sound, ((0, 0), (0, missing))))


def mixed(sound: Sound, channels: int) -> Sound:
    """The sound with that many channels."""
    if sound.shape[0] == channels:
        return sound
    if channels == 1:
        return _mean(sound)
    if sound.shape[0] > channels:
        return sound[:channels]
    return np.repeat(_mean(sound), channels, axis=0)


def _mean(sound: Sound) -> Sound:
    one: Sound = sound.mean(axis=0, keepdims=True, dtype=np.float32)
    return one


def resampled(sound: Sound, rate: int, to_rate: int) -> Sound:
    """The sound at another rate; each channel by itself, so that any number of them is treated alike."""
    if rate == to_rate:
        return sound
    return np.concatenate([_resampled_mono(channel, rate, to_rate) for channel in sound])


def _resampled_mono(channel: Sound, rate: int, to_rate: int) -> Sound:
    import av

    resampler = av.AudioResampler(format="fltp", layout="mono", rate=to_rate)
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(channel)[None], format="fltp", layout="mono")
    frame.sample_rate = rate
    parts = [*resampler.resample(frame), *resampler.resample(None)]
    joined: Sound = np.concatenate([part.to_ndarray() for part in parts], axis=1)
    return joined


def _by_soundfile(payload: memoryview, begin_s: float, length_s: float) -> tuple[Sound, int]:
    import soundfile

    with soundfile.SoundFile(Window(payload)) as file:
        if file.frames > MAX_SECONDS * file.samplerate:
            raise BrokenMedia(f"{file.frames} samples are more than {MAX_SECONDS:g} s")
        file.seek(min(round(begin_s * file.samplerate), file.frames))
        stretch = file.read(ceil(length_s * file.samplerate), dtype="float32", always_2d=True)
        return _checked(stretch.T), file.samplerate


def _by_av(payload: memoryview, begin_s: float, length_s: float) -> tuple[Sound, int]:
    """Decodes from the file's beginning: what compressed sound sounds like depends on what came before."""
    import av

    parts: list[Sound] = []
    with av.open(Window(payload), mode="r", metadata_errors="replace") as container:
        if not container.streams.audio:
            raise BrokenMedia("no sound stream")
        stream = container.streams.audio[0]
        codec: Any = stream.codec_context
        if codec is None:
            raise BrokenMedia("a codec that FFmpeg does not know")
        rate: int = codec.sample_rate
        begin, end = round(begin_s * rate), round(begin_s * rate) + ceil(length_s * rate)
        planar = av.AudioResampler(format="fltp", layout=codec.layout, rate=rate)
        at = 0
        for frame in container.decode(stream):
            for part in planar.resample(frame):
                if at + part.samples > begin and at < end:
                    parts.append(part.to_ndarray()[:, max(0, begin - at) : end - at].astype(np.float32))
                at += part.samples
            if at >= end:
                break
    if not parts:
        raise BrokenMedia("holds no sound where some was expected")
    return _checked(np.concatenate(parts, axis=1)), rate


def _checked(sound: Sound) -> Sound:
    if not sound.size:
        raise BrokenMedia("holds no sound where some was expected")
    if not np.isfinite(sound).all():
        raise BrokenMedia("holds values that are not numbers")
    return sound
