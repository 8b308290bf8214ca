"""Bulk I/O: the C implementation and the Python implementation have the same results and errors."""

import errno
import os
import threading
import time

import pytest

from supertuner.core.bulk_io import BulkReader, find_native_library

BOTH = [pytest.param(True, id="C"), pytest.param(False, id="Python")]


def bulk_reader(nbytes, in_c):
    if in_c and find_native_library() is None:
        pytest.skip("the package was installed without a C compiler")
    return BulkReader(nbytes, find_native_library() if in_c else None)


@pytest.mark.parametrize("in_c", BOTH)
def test_files_are_read_into_the_buffer_and_their_state_is_returned(tmp_path, in_c):
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b ü").write_bytes(b"short")
    os.mkfifo(tmp_path / "pipe")
    paths = [str(tmp_path / name) for name in ("a", "gone", "b ü", "pipe", "")]
    buffer = bulk_reader(64, in_c)
    results = buffer.read(paths, [2, 0, 0, 0, 0], [4, 4, 9, 4, 4], [0, 10, 20, 40, 50])
    assert bytes(buffer.view[:10]) == b"2345" + bytes(6) and bytes(buffer.view[20:30]) == b"short" + bytes(5)
    assert [result.error for result in results] == [0, errno.ENOENT, 0, errno.ESPIPE, errno.EISDIR]
    assert (results[0].file_bytes, results[2].file_bytes) == (10, 5)
    assert results[0].mtime_ns == (tmp_path / "a").stat().st_mtime_ns and results[0].is_regular


@pytest.mark.parametrize("in_c", BOTH)
def test_records_are_written_to_their_offsets_and_a_failure_is_an_oserror(tmp_path, in_c):
    buffer = bulk_reader(16, in_c)
    buffer.view[:6] = b"abcdef"
    with open(tmp_path / "out", "w+b") as out:
        buffer.write(out.fileno(), [0, 3], [2, 3], [5, 0])
        assert (tmp_path / "out").read_bytes() == b"def\0\0ab"
    with open(tmp_path / "out", "rb") as read_only, pytest.raises(OSError) as caught:
        buffer.write(read_only.fileno(), [0], [2], [0])
    assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize("in_c", BOTH)
def test_an_offset_outside_the_buffer_is_an_assertion_error(tmp_path, in_c):
    buffer = bulk_reader(16, in_c)
    with pytest.raises(AssertionError):
        buffer.read([str(tmp_path)], [0], [10], [8])
    with pytest.raises(AssertionError):
        buffer.write(0, [-8], [4], [0])


def test_other_threads_run_while_many_files_are_read(tmp_path):
    buffer = bulk_reader(1 << 20, True)
    (tmp_path / "a").write_bytes(bytes(1 << 20))
    turns = 0
    done = threading.Event()

    def count():
        nonlocal turns
        while not done.is_set():
            turns += 1

    other = threading.Thread(target=count)
    other.start()
    before, began = turns, time.perf_counter()
    buffer.read([str(tmp_path / "a")] * 200, [0] * 200, [1 << 20] * 200, [0] * 200)
    took, meanwhile = time.perf_counter() - began, turns - before
    done.set()
    other.join()
    assert meanwhile > 100 and took < 30
