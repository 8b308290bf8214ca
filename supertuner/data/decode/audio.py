"""Decodes a segment of an audio file as float32 [channels, samples] at a target sample rate and channel count.

libsndfile decodes WAV, FLAC, Ogg and MP3: it reads only the segment and is faster (7 times for WAV). PyAV decodes the
other formats. FFmpeg's resampler changes the sample rate. Mono is copied to all target channels, several channels are
averaged to mono, and of more channels than the target has, the first ones are used.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from supertuner.core.errors import BrokenMediaError
from supertuner.data.probe.audio import MAX_SECONDS
from supertuner.data.probe.media_info import AV_AUDIO_FORMATS
from supertuner.data.probe.memoryview_file import MemoryviewFile, open_with_av
from supertuner.data.probe.sniff import HEAD_BYTES, sniff

AudioArray = NDArray[np.float32]

MARGIN_BEFORE_S, MARGIN_AFTER_S = 0.25, 0.05
"""Extra audio read around the segment and cut off after resampling, so that the resampler's filter does not see silence
at the edges, and MP3, whose frames depend on earlier ones, has recovered from the seek."""

MAX_MISSING_S = 0.1
"""A segment that ends up to this much early is padded with silence, because codecs pad and cut a few milliseconds."""


def decode_audio(payload: memoryview, begin_s: float, samples: int, rate: int, channels: int) -> AudioArray:
    """`samples` samples at `rate` from `begin_s` on, as [channels, samples]."""
    margin_s = min(begin_s, MARGIN_BEFORE_S)
    read_s = margin_s + samples / rate + MARGIN_AFTER_S
    needs_av = sniff(bytes(payload[:HEAD_BYTES])) in AV_AUDIO_FORMATS
    segment, file_rate = (_read_with_av if needs_av else _read_with_soundfile)(payload, begin_s - margin_s, read_s)
    sound = resample(mix_channels(segment, channels), file_rate, rate)
    skip = round(margin_s * rate)
    sound = sound[:, skip : skip + samples]
    missing = samples - sound.shape[1]
    if missing > MAX_MISSING_S * rate:
        raise BrokenMediaError(f"ends {missing / rate:.2f} s before the length that its header states")
    return np.ascontiguousarray(np.pad(sound, ((0, 0), (0, missing))))


def mix_channels(audio: AudioArray, channels: int) -> AudioArray:
    """Convert audio to a number of channels."""
    if audio.shape[0] == channels:
        return audio
    if 1 < channels < audio.shape[0]:
        return audio[:channels]
    mono: AudioArray = audio.mean(axis=0, keepdims=True, dtype=np.float32)
    return np.repeat(mono, channels, axis=0)


def resample(audio: AudioArray, rate: int, target_rate: int) -> AudioArray:
    """Resample audio, one channel at a time, so that any number of channels works."""
    if rate == target_rate:
        return audio
    return np.concatenate([_resample_mono(channel, rate, target_rate) for channel in audio])


def _resample_mono(channel: AudioArray, rate: int, target_rate: int) -> AudioArray:
    import av

    resampler = av.AudioResampler(format="fltp", layout="mono", rate=target_rate)
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(channel)[None], format="fltp", layout="mono")
    frame.sample_rate = rate
    parts = [*resampler.resample(frame), *resampler.resample(None)]
    joined: AudioArray = np.concatenate([part.to_ndarray() for part in parts], axis=1)
    return joined


def _read_with_soundfile(payload: memoryview, begin_s: float, length_s: float) -> tuple[AudioArray, int]:
    import soundfile

    with soundfile.SoundFile(MemoryviewFile(payload)) as file:
        if file.frames > MAX_SECONDS * file.samplerate:
            raise BrokenMediaError(f"{file.frames} samples are more than {MAX_SECONDS:g} s")
        file.seek(min(round(begin_s * file.samplerate), file.frames))
        segment = file.read(ceil(length_s * file.samplerate), dtype="float32", always_2d=True)
        return _require_valid_audio(segment.T), file.samplerate


def _read_with_av(payload: memoryview, begin_s: float, length_s: float) -> tuple[AudioArray, int]:
    """Decodes from the beginning of the file, because compressed audio depends on what precedes it."""
    import av

    parts: list[AudioArray] = []
    with open_with_av(payload) as container:
        if not container.streams.audio:
            raise BrokenMediaError("no audio stream")
        stream = container.streams.audio[0]
        codec: Any = stream.codec_context
        if codec is None:
            raise BrokenMediaError("FFmpeg does not support its codec")
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
        raise BrokenMediaError("contains no audio in the requested segment")
    return _require_valid_audio(np.concatenate(parts, axis=1)), rate


def _require_valid_audio(audio: AudioArray) -> AudioArray:
    if not audio.size:
        raise BrokenMediaError("contains no audio in the requested segment")
    if not np.isfinite(audio).all():
        raise BrokenMediaError("contains values that are not finite")
    return audio
