"""Gathering batches: one copy into the caller's buffer, and a clear error for a buffer that does not fit."""

from __future__ import annotations

import os
import re
import signal
import threading

import numpy as np
import pytest
import torch

from supertuner.arena.home import ArenaHome
from supertuner.arena.reader import ArenaReader
from tests.arena.arena_helpers import build, units


def rows(home: ArenaHome, shape: tuple[int, ...], dtype: str = "float32", count: int = 50) -> ArenaReader:
    rng = np.random.default_rng(0)
    with home.build("a") as arena_build:
        writers = [arena_build.open_writer(), arena_build.open_writer(), arena_build.open_writer()]
        for i in range(count):
            with writers[i % 3].begin(f"{i:04d}") as unit:
                unit.put("x", rng.integers(0, 100, shape).astype(dtype))
                if i % 3 == 0:
                    unit.put("other", b"!")
        arena_build.seal({})
    return home.attach("a")


@pytest.mark.parametrize("shape", [(3,), (1024,), (2, 1024), (16, 16, 16), (5, 5000), (), (0, 4)])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_gather_copies_the_requested_units_in_the_requested_order(
    home: ArenaHome, shape: tuple[int, ...], kind: str
) -> None:
    with rows(home, shape) as reader:
        wanted = [7, 49, 0, 7, 31]
        expected = np.stack([reader.array(i, "x") for i in wanted])
        out = np.full((5, *shape), -1, np.float32)
        reader.gather(wanted, torch.from_numpy(out) if kind == "torch" else out, "x")
        assert np.array_equal(out, expected)


@pytest.mark.parametrize("indices", [np.array([3, 1], np.int32), torch.tensor([3, 1]), (3, 1), range(3, 0, -2)])
def test_indices_may_be_any_integer_sequence(home: ArenaHome, indices: object) -> None:
    with rows(home, (2, 2)) as reader:
        out = np.zeros((2, 2, 2), np.float32)
        reader.gather(indices, out, "x")  # type: ignore[arg-type]
        assert np.array_equal(out[0], reader.array(3, "x")) and np.array_equal(out[1], reader.array(1, "x"))


def test_gathering_no_indices_copies_nothing(home: ArenaHome) -> None:
    with rows(home, (2,)) as reader:
        reader.gather([], np.zeros((0, 2), np.float32), "x")


def test_rows_can_be_bytes_and_bfloat16_is_supported(home: ArenaHome) -> None:
    with home.build("a") as arena_build:
        for i in range(4):
            with arena_build.open_writer().begin(str(i)) as unit:
                unit.put("x", torch.full((8, 256), float(i), dtype=torch.bfloat16))
        arena_build.seal({})
    with home.attach("a") as reader:
        out = torch.zeros(2, 8, 256, dtype=torch.bfloat16)
        reader.gather([3, 1], out, "x")
        assert out[0].unique().tolist() == [3.0] and out[1].unique().tolist() == [1.0]
        raw = np.zeros((2, 4096), np.uint8)
        reader.gather([3, 1], raw, "x")
        assert raw[0].tobytes() == bytes(reader.view(3, "x"))


@pytest.mark.parametrize(
    ("out", "problem"),
    [
        (np.zeros((1, 2, 2), np.float32), "its first dimension must be 2"),
        (np.zeros((2, 2, 3), np.float32), "a record has float32 (2, 2)"),
        (np.zeros((2, 2, 2), np.float64), "a record has float32 (2, 2)"),
        (np.zeros((2, 4), np.float32), "a record has float32 (2, 2)"),
        (np.zeros((2, 2, 4), np.float32)[:, :, ::2], "contiguous"),
        (torch.zeros(2, 2, 2).transpose(0, 1), "contiguous"),
        ([0, 0], "numpy array or a torch tensor"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(home: ArenaHome, out: object, problem: str) -> None:
    with rows(home, (2, 2)) as reader, pytest.raises(ValueError, match=re.escape(problem)):
        reader.gather([0, 1], out, "x")  # type: ignore[arg-type]


@pytest.mark.parametrize("indices", [[50], [-1], [0, 1 << 40]])
def test_an_index_out_of_range_is_refused(home: ArenaHome, indices: list[int]) -> None:
    with rows(home, (2,)) as reader, pytest.raises(IndexError, match="units 0 to 49"):
        reader.gather(indices, np.zeros((len(indices), 2), np.float32), "x")


def test_a_missing_field_and_records_of_different_sizes_are_refused(home: ArenaHome) -> None:
    with rows(home, (2,)) as reader, pytest.raises(KeyError, match="unit 1 has no field 'other'"):
        reader.gather([0, 1], np.zeros((2, 1), np.uint8), "other")
    build(home, "b", units(4))
    with home.attach("b") as reader, pytest.raises(ValueError):
        reader.gather([0, 1, 2, 3], np.zeros((4, 100), np.uint8))


def test_a_write_to_a_tensor_is_invisible_to_other_readers(home: ArenaHome) -> None:
    with rows(home, (2, 2)) as reader, home.attach("a") as other:
        before = other.array(0, "x").copy()
        reader.tensor(0, "x").fill_(-1)
        assert np.array_equal(other.array(0, "x"), before)
        other.verify()
        reader.verify()


def test_views_are_read_only_and_stay_valid_after_the_reader_is_closed(home: ArenaHome) -> None:
    reader = rows(home, (2, 2))
    view, array, tensor = reader.view(0, "x"), reader.array(0, "x"), reader.tensor(0, "x")
    assert view.readonly and not array.flags.writeable
    reader.close()
    home.remove("a")
    assert bytes(view) == array.tobytes() == tensor.numpy().tobytes()
    with pytest.raises(AssertionError, match="closed"):
        reader.view(0, "x")


@pytest.mark.parametrize("shape", [(256, 1024), (250, 1001)])
@pytest.mark.parametrize("threads", [2, 3, 100])
def test_a_batch_copied_by_several_threads_equals_one_copied_by_one(
    home: ArenaHome, shape: tuple[int, ...], threads: int
) -> None:
    with rows(home, shape, count=12) as reader:
        wanted = [7, 11, 0, 7, 3, 2, 1] * 3
        out = np.full((21, *shape), -1, np.float32)
        reader.gather(wanted, out, "x", threads=threads)
        assert np.array_equal(out, np.stack([reader.array(i, "x") for i in wanted]))
        assert any(thread.name.startswith("arena-copy") for thread in threading.enumerate())
    assert not any(thread.name.startswith("arena-copy") for thread in threading.enumerate())


def test_a_forked_child_creates_its_own_copy_threads(home: ArenaHome) -> None:
    with rows(home, (1024, 1024), count=4) as reader:
        out = np.zeros((4, 1024, 1024), np.float32)
        reader.gather(range(4), out, "x", threads=2)
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # with the parent's pool it would wait forever
            out[:] = -1
            reader.gather(range(4), out, "x", threads=2)
            os._exit(0 if np.array_equal(out[3], reader.array(3, "x")) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
