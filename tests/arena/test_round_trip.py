"""Everything that is put into an arena is read back unchanged: bytes, arrays, tensors, keys, tables and meta."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from supertuner.arena.home import ArenaHome
from supertuner.core.errors import ArenaError, BrokenMediaError
from tests.arena.arena_helpers import build, contents, fresh_home, units

ARRAYS = st_numpy.arrays(
    dtype=st.sampled_from(
        ["u1", "i1", "<u2", ">i2", "u4", "i4", "u8", "i8", "f2", "f4", ">f8", "bool", "complex64", "complex128"]
    ),
    shape=st_numpy.array_shapes(min_dims=0, max_dims=8, min_side=0, max_side=4),
)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)


def test_units_are_read_back_unchanged(any_home: ArenaHome) -> None:
    content = units(40)
    build(any_home, "a", content)
    assert contents(any_home, "a") == content


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(KEYS, ARRAYS, min_size=1, max_size=5))
def test_arrays_of_any_dtype_shape_and_key_are_read_back(arrays: dict[str, np.ndarray]) -> None:
    with fresh_home() as home:
        with home.build("a") as arena_build:
            writer = arena_build.open_writer()
            for key, array in arrays.items():
                with writer.begin(key) as unit:
                    unit.put("x", array)
            arena_build.seal({})
        with home.attach("a") as reader:
            assert [reader.key(i) for i in range(len(reader))] == sorted(arrays, key=str.encode)
            for key, array in arrays.items():
                found = reader.find(key)
                assert found is not None
                back = reader.array(found, "x")
                assert back.shape == array.shape and back.dtype == array.dtype.newbyteorder("<")
                assert back.tobytes() == array.astype(back.dtype).tobytes()
                assert np.array_equal(reader.tensor(found, "x").numpy(), back, equal_nan=array.dtype.kind in "fc")
            reader.verify()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.int64])
def test_tensors_keep_dtypes_that_numpy_lacks(home: ArenaHome, dtype: torch.dtype) -> None:
    tensor = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4).to(dtype).transpose(0, 2)
    with home.build("a") as arena_build:
        with arena_build.open_writer().begin("k") as unit:
            unit.put("latents", tensor)
            unit.put("nothing", torch.empty(0, 3, dtype=dtype))
        arena_build.seal({})
    with home.attach("a") as reader:
        back = reader.tensor(0, "latents")
        assert back.dtype == dtype and torch.equal(back.view(torch.uint8), tensor.contiguous().view(torch.uint8))
        assert reader.tensor(0, "nothing").shape == (0, 3)


def test_a_dtype_that_numpy_lacks_raises_an_error_with_a_remedy(home: ArenaHome) -> None:
    with home.build("a") as arena_build:
        with arena_build.open_writer().begin("k") as unit:
            unit.put("x", torch.ones(3, dtype=torch.bfloat16))
        arena_build.seal({})
    with home.attach("a") as reader, pytest.raises(ValueError, match=r"no dtype bfloat16.*tensor\(\)"):
        reader.array(0, "x")


def test_units_are_numbered_by_key_in_any_order_of_writing(home: ArenaHome) -> None:
    for name, keys in (("a", ["b", "é", "a", "zz", "z"]), ("b", ["zz", "z", "é", "a", "b"])):
        with home.build(name) as arena_build:
            for key in keys:
                with arena_build.open_writer().begin(key) as unit:
                    unit.put("media", key.encode())
            arena_build.seal({})
    with home.attach("a") as a, home.attach("b") as b:
        assert [a.key(i) for i in range(5)] == [b.key(i) for i in range(5)] == ["a", "b", "z", "zz", "é"]
        assert a.find("zz") == 3 and a.find("y") is None and a.find("") is None and a.find("zzz") is None


def test_a_compressed_record_has_its_codec_and_both_sizes(home: ArenaHome) -> None:
    with home.build("a") as arena_build:
        with arena_build.open_writer().begin("k") as unit:
            unit.put("media", b"packed", codec="zstd", raw_nbytes=1000)
        arena_build.seal({})
    with home.attach("a") as reader:
        assert (reader.codec(0), reader.nbytes(0), reader.raw_nbytes(0)) == ("zstd", 6, 1000)
        assert bytes(reader.view(0)) == b"packed"
        with pytest.raises(ValueError, match="compressed with zstd"):
            reader.array(0)


def test_units_may_have_different_fields(home: ArenaHome) -> None:
    with home.build("a") as arena_build:
        writer = arena_build.open_writer()
        for key, field in (("k0", "media"), ("k1", "text")):
            with writer.begin(key) as unit:
                unit.put(field, b"1")
        arena_build.seal({})
    with home.attach("a") as reader:
        assert reader.has(0, "media") and not reader.has(0, "text")
        with pytest.raises(KeyError, match=r"k0.*has no field 'text'"):
            reader.view(0, "text")
        with pytest.raises(KeyError, match="no field 'audio' in a; it has media, text"):
            reader.view(0, "audio")
        with pytest.raises(IndexError):
            reader.view(-1)


def test_tables_and_meta_are_read_back(home: ArenaHome) -> None:
    build(home, "a", units(9))
    with home.attach("a") as reader:
        assert reader.table("lengths").tolist() == [0, 1, 100, 4095, 4096, 4097, 9000, 65536, 70000]
        assert not reader.table("lengths").flags.writeable
        assert reader.meta == {"made": "by a test"}
        with pytest.raises(KeyError, match="it has lengths"):
            reader.table("widths")


def test_an_arena_without_units_can_be_read(home: ArenaHome) -> None:
    build(home, "a", {})
    with home.attach("a") as reader:
        assert len(reader) == 0 and reader.find("x") is None
        reader.verify()


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 300_000, (1 << 20) + 5, 5 << 20])
def test_a_file_is_stored_and_its_content_can_be_inspected(any_home: ArenaHome, tmp_path: Path, nbytes: int) -> None:
    content = os.urandom(nbytes)
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file, any_home.build("a") as arena_build:
        with arena_build.open_writer().begin("k") as unit:
            seen = unit.put_file("media", file.fileno(), nbytes)
            assert seen.readonly and bytes(seen) == content
        arena_build.seal({})
    assert contents(any_home, "a") == {"k": content}


def test_a_file_that_shrank_raises_broken_media_and_leaves_no_trace(home: ArenaHome, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 40)
    with home.build("a") as arena_build:
        writer = arena_build.open_writer()
        shrunk = pytest.raises(BrokenMediaError, match="10240 of 20000")
        with (tmp_path / "file").open("rb") as file, shrunk, writer.begin("k") as unit:
            unit.put_file("media", file.fileno(), 20_000)
        with writer.begin("good") as unit:
            unit.put("media", b"1")
        arena_build.seal({})
    assert contents(home, "a") == {"good": b"1"}


def test_records_are_aligned_and_padding_takes_no_memory(home: ArenaHome) -> None:
    content = {f"{i:03d}": os.urandom(65536 + 100) for i in range(50)}
    build(home, "a", content, writers=1)
    with home.attach("a") as reader:
        for i in range(50):
            assert reader.array(i).ctypes.data % 4096 == 0
        [info] = home.list_arenas()
        assert info.nbytes < 50 * (65536 + 4096) + 65536, "17 pages each, not 32"


@pytest.mark.parametrize("key", ["", "x" * 70_000, "\udc80"])
def test_an_invalid_key_is_refused(home: ArenaHome, key: str) -> None:
    with home.build("a") as arena_build, pytest.raises(ArenaError, match="key"):
        arena_build.open_writer().begin(key)


def test_the_longest_key_works(home: ArenaHome) -> None:
    content = {"é" * 32_000: b"1", "é" * 32_001: b"2"}
    build(home, "a", content)
    assert contents(home, "a") == content


def test_a_key_committed_twice_raises_an_error_that_names_it(home: ArenaHome) -> None:
    with home.build("a") as arena_build:
        for _ in range(2):
            with arena_build.open_writer().begin("same") as unit:
                unit.put("media", b"1")
        with pytest.raises(ArenaError, match="'same' was committed twice"):
            arena_build.seal({})
    assert home.list_arenas() == []


def test_meta_above_the_size_limit_is_refused_when_sealing(home: ArenaHome) -> None:
    with home.build("a") as arena_build, pytest.raises(ArenaError, match="put it in a table"):
        arena_build.seal({"x": "y" * (5 << 20)})
