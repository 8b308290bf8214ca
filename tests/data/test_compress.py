"""Compression: `auto` chooses codecs by a trial on the files, and every codec restores the original bytes."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from supertuner.core.errors import BrokenMediaError
from supertuner.data.staging.compress import RAW_CODEC, CodecTrial, choose_codec, compress, decompress
from tests.data.media_files import picture, sound, write
from tests.data.staging import RecordingSink, contents, dataset, stager

CODECS = ("lz4", "snappy", "zlib", "zstd")


@given(st.sampled_from(CODECS), st.binary(min_size=1, max_size=5000), st.integers(1, 50))
def test_decompression_restores_the_bytes(codec, content, times):
    original = content * times
    assert decompress(codec, memoryview(bytes(compress(codec, original))), len(original)) == original


@given(st.sampled_from(CODECS), st.binary(min_size=1, max_size=2000), st.integers(-3, 3).filter(bool))
def test_decompression_to_a_size_other_than_stated_is_refused(codec, content, wrong):
    stored = memoryview(bytes(compress(codec, content)))
    if len(content) + wrong > 0:
        with pytest.raises(BrokenMediaError):
            decompress(codec, stored, len(content) + wrong)


def test_auto_chooses_the_fastest_codec_that_saves_five_percent():
    def trial(lz4, zstd):
        return CodecTrial("wav", 12, 1000, {"lz4": lz4, "zstd": zstd})

    assert choose_codec("auto", trial(949, 500)).codec == "lz4"
    assert choose_codec("auto", trial(951, 950)).codec == "zstd"
    assert choose_codec("auto", trial(951, 951)).codec == RAW_CODEC


def uncompressed_png(seed):
    """A PNG of one colour, saved without compression."""
    pixels = np.full((64, 64, 3), seed, np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=0)
    return out.getvalue()


def test_auto_decides_by_the_actual_format_not_by_the_extension(tmp_path):
    """Uncompressed PNGs and JPEGs, all named .jpg."""
    files = {f"p{i}.jpg": uncompressed_png(i) for i in range(12)} | {
        f"j{i}.jpg": picture(size=(96, 96), seed=i) for i in range(12)
    }
    sink = RecordingSink()
    result = stager(tmp_path / "home", sink).stage(
        dataset(write(tmp_path / "set", files), in_memory={"compression": "auto"})
    )
    decisions = sink.decisions()
    assert decisions["datasets[set].in_memory.compression.png"] == "lz4"
    assert decisions["datasets[set].in_memory.compression.jpeg"] == "raw"
    assert result.formats["png"]["ratio"] > 5 and result.formats["jpeg"]["ratio"] == 1
    assert {f"{key}.jpg": stored[0] for key, stored in contents(tmp_path / "home", result.arena).items()} == files


@pytest.mark.parametrize("setting", [None, "none"])
def test_without_a_setting_nothing_is_compressed(tmp_path, setting):
    files = {"a.png": uncompressed_png(3)}
    sink = RecordingSink()
    result = stager(tmp_path / "home", sink).stage(
        dataset(write(tmp_path / "set", files), in_memory={"compression": setting})
    )
    assert result.formats["png"]["codec"] == "raw" and not any("compression" in what for what in sink.decisions())


def test_silence_is_compressed(tmp_path):
    files = {f"{i}.wav": sound("wav", 0.2)[:44] + bytes(len(sound("wav", 0.2)) - 44) for i in range(3)}
    result = stager(tmp_path / "home").stage(
        dataset(write(tmp_path / "set", files), dataset_type="audio", in_memory={"compression": "auto"})
    )
    assert result.formats["wav"]["codec"] == "lz4" and result.formats["wav"]["ratio"] > 2
