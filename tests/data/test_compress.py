"""Compression is chosen where it pays, measured on the files themselves, and what is read back is what was stored."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from supertuner.core.errors import BrokenMediaError
from supertuner.data.staging.compress import CODECS, RAW_CODEC, CodecTrial, choose_codec, compress, decompress
from tests.data.media_files import picture, sound, write
from tests.data.staging import RecordingSink, contents, dataset, stager


@given(st.sampled_from(CODECS), st.binary(min_size=1, max_size=5000), st.integers(1, 50))
def test_what_was_compressed_comes_back(codec, content, times):
    whole = content * times
    assert decompress(codec, memoryview(bytes(compress(codec, whole))), len(whole)) == whole


@given(st.sampled_from(CODECS), st.binary(min_size=1, max_size=2000), st.integers(-3, 3).filter(bool))
def test_another_size_than_the_stated_one_is_refused_not_returned(codec, content, wrong):
    stored = memoryview(bytes(compress(codec, content)))
    if len(content) + wrong > 0:
        with pytest.raises(BrokenMediaError):
            decompress(codec, stored, len(content) + wrong)


def test_auto_takes_the_codec_that_is_fastest_to_read_of_those_that_save_five_percent():
    def trial(lz4, zstd):
        return CodecTrial("wav", 12, 1000, {"lz4": lz4, "zstd": zstd})

    assert choose_codec("auto", trial(949, 500)).codec == "lz4"
    assert choose_codec("auto", trial(951, 950)).codec == "zstd"
    assert choose_codec("auto", trial(951, 951)).codec == RAW_CODEC


def flat_picture(seed):
    """A PNG that its encoder did not compress."""
    pixels = np.full((64, 64, 3), seed, np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=0)
    return out.getvalue()


def test_auto_decides_by_the_real_format_not_by_the_name(tmp_path):
    """Uncompressed PNGs and JPEGs, all called .jpg."""
    files = {f"p{i}.jpg": flat_picture(i) for i in range(12)} | {
        f"j{i}.jpg": picture(size=(96, 96), seed=i) for i in range(12)
    }
    told = RecordingSink()
    result = stager(tmp_path / "home", told).stage(
        dataset(write(tmp_path / "set", files), in_memory={"compression": "auto"})
    )
    decided = told.decided()
    assert decided["datasets[set].in_memory.compression.png"] == "lz4"
    assert decided["datasets[set].in_memory.compression.jpeg"] == "raw"
    assert result.formats["png"]["ratio"] > 5 and result.formats["jpeg"]["ratio"] == 1
    assert {f"{key}.jpg": found[0] for key, found in contents(tmp_path / "home", result.arena).items()} == files


@pytest.mark.parametrize("setting", [None, "none"])
def test_omitted_means_none(tmp_path, setting):
    files = {"a.png": flat_picture(3)}
    told = RecordingSink()
    result = stager(tmp_path / "home", told).stage(
        dataset(write(tmp_path / "set", files), in_memory={"compression": setting})
    )
    assert result.formats["png"]["codec"] == "raw" and not any("compression" in what for what in told.decided())


def test_silence_compresses_and_noise_does_not(tmp_path):
    files = {f"{i}.wav": sound("wav", 0.2)[:44] + bytes(len(sound("wav", 0.2)) - 44) for i in range(3)}
    result = stager(tmp_path / "home").stage(
        dataset(write(tmp_path / "set", files), dataset_type="audio", in_memory={"compression": "auto"})
    )
    assert result.formats["wav"]["codec"] == "lz4" and result.formats["wav"]["ratio"] > 2
