"""Audio decodes to the requested rate, length and channels, in pitch and phase; damage raises BrokenMediaError."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from supertuner.core.errors import BrokenMediaError
from supertuner.data.decode import raising_broken_media
from supertuner.data.decode.audio import decode_audio

RATE = 24_000


def sines(seconds: float, rate: int, channels: int) -> np.ndarray:
    """Sines of (c + 1) · 220 Hz in channel c, as [samples, channels]."""
    time = np.arange(round(seconds * rate)) / rate
    return np.column_stack([0.5 * np.sin(2 * np.pi * 220 * (c + 1) * time) for c in range(channels)]).astype(np.float32)


def encoded(seconds: float = 2.0, rate: int = RATE, channels: int = 2, format: str = "WAV", **options) -> memoryview:
    out = io.BytesIO()
    soundfile.write(out, sines(seconds, rate, channels), rate, format=format, **options)
    return memoryview(out.getvalue())


def in_mp4(seconds: float = 2.0, rate: int = RATE) -> memoryview:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=rate, layout="stereo")
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(sines(seconds, rate, 2).T), format="fltp", layout="stereo"
        )
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return memoryview(out.getvalue())


def expected(begin: float, samples: int, rate: int, channels: int = 2) -> np.ndarray:
    return sines(begin + samples / rate + 1, rate, channels)[round(begin * rate) :][:samples].T


@pytest.mark.parametrize("format", ["WAV", "FLAC"])
def test_a_segment_is_exactly_the_samples_of_the_file(format):
    audio = decode_audio(encoded(format=format, subtype="PCM_16"), 0.5, 12_000, RATE, 2)
    assert audio.shape == (2, 12_000) and audio.dtype == np.float32
    assert np.abs(audio - expected(0.5, 12_000, RATE)).max() < 1e-4


@pytest.mark.parametrize(("format", "tolerance"), [("OGG", 0.05), ("MP3", 0.08)])
def test_compressed_audio_is_close_and_in_phase(format, tolerance):
    audio = decode_audio(encoded(format=format), 0.5, 12_000, RATE, 2)
    assert np.abs(audio - expected(0.5, 12_000, RATE)).max() < tolerance


def test_audio_in_mp4_is_close_and_in_phase():
    audio = decode_audio(in_mp4(), 0.5, 12_000, RATE, 2)
    error = np.abs(audio - expected(0.5, 12_000, RATE)).max()
    assert audio.shape == (2, 12_000) and error < 0.08


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 48_000])
def test_another_rate_keeps_pitch_and_phase(rate):
    audio = decode_audio(encoded(rate=rate), 0.7, 12_000, RATE, 2)
    assert np.abs(audio - expected(0.7, 12_000, RATE))[:, 100:-100].max() < 0.02


def test_the_first_and_the_last_segment_have_their_full_length():
    for begin in (0.0, 1.5):
        audio = decode_audio(encoded(rate=44_100), begin, 12_000, RATE, 2)
        assert np.abs(audio - expected(begin, 12_000, RATE))[:, 100:-100].max() < 0.02


def test_mono_is_copied_several_channels_are_averaged_and_extra_ones_dropped():
    copied = decode_audio(encoded(channels=1), 0, 2400, RATE, 2)
    assert np.array_equal(copied[0], copied[1])
    mean = decode_audio(encoded(channels=2), 0, 2400, RATE, 1)
    assert np.allclose(mean[0], expected(0, 2400, RATE).mean(axis=0), atol=1e-3)
    first = decode_audio(encoded(channels=6), 0, 2400, RATE, 2)
    assert np.allclose(first, expected(0, 2400, RATE), atol=1e-3)


def test_a_file_that_ends_early_is_refused():
    with pytest.raises(BrokenMediaError, match=r"ends 1\.00 s before"):
        decode_audio(encoded(seconds=2), 0, 3 * RATE, RATE, 2)


def test_values_that_are_not_finite_are_refused():
    out = io.BytesIO()
    soundfile.write(out, np.full((RATE, 1), np.nan, np.float32), RATE, format="WAV", subtype="FLOAT")
    with pytest.raises(BrokenMediaError, match="not finite"):
        decode_audio(memoryview(out.getvalue()), 0, 2400, RATE, 1)


COMPLETE = {
    "wav": encoded(0.5),
    "flac": encoded(0.5, format="FLAC"),
    "ogg": encoded(0.5, format="OGG"),
    "mp3": encoded(0.5, format="MP3"),
    "mp4": in_mp4(0.5),
}


@given(st.sampled_from(sorted(COMPLETE)), st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_bytes_raise_broken_media_error_or_decode(format, data):
    content = bytearray(COMPLETE[format])
    for _ in range(data.draw(st.integers(0, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    try:
        with raising_broken_media("sound"):
            audio = decode_audio(memoryview(bytes(content[:cut])), 0.1, 4800, 16_000, 2)
    except BrokenMediaError as error:
        assert str(error).startswith("sound: ")
    else:
        assert audio.shape == (2, 4800) and np.isfinite(audio).all()
