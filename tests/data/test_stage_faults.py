"""Kills, full file systems and failing disks while staging: a clear error or a set-aside file, and no leftovers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from supertuner.core.errors import DoesNotFitError
from tests.data.kills import kill_stagers
from tests.data.media_files import picture, write
from tests.data.staging import RecordingSink, dataset, names, stager

ROOT = Path(__file__).resolve().parents[2]


def pictures(count, side=96):
    return {f"{i:04d}.jpg": picture("jpeg", (side, side), seed=i) for i in range(count)}


def test_staging_works_after_twenty_killed_stagers(tmp_path):
    folder = write(tmp_path / "set", pictures(200))
    assert kill_stagers(folder, tmp_path / "home", times=20, seed=0) > 2


@pytest.fixture
def small_tmpfs(tmp_path):
    """A tmpfs of two megabytes."""
    mount_point = tmp_path / "small"
    mount_point.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small tmpfs needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount_point)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield mount_point
    subprocess.run(["umount", str(mount_point)], check=True)


def test_a_dataset_larger_than_its_tmpfs_is_refused_before_copying(tmp_path, small_tmpfs):
    folder = write(tmp_path / "set", pictures(300))
    sink = RecordingSink()
    with pytest.raises(DoesNotFitError, match=r"are free on the shared memory below the arena's home.*are missing"):
        stager(small_tmpfs / "home", sink).stage(dataset(folder))
    assert not any(title.startswith("staging") for title, _, _ in sink.phases)
    assert names(small_tmpfs / "home") == []


def test_a_tmpfs_filled_by_another_program_ends_staging_with_the_missing_bytes(tmp_path, small_tmpfs):
    folder = write(tmp_path / "set", pictures(200))

    def when(title):
        if title.startswith("staging"):
            (small_tmpfs / "other").write_bytes(bytes(1_000_000))

    with pytest.raises(DoesNotFitError, match=r"No space left on device.*are missing"):
        stager(small_tmpfs / "home", RecordingSink(when)).stage(dataset(folder))
    assert names(small_tmpfs / "home") == []
    os.unlink(small_tmpfs / "other")
    assert stager(small_tmpfs / "home").stage(dataset(folder)).files == 200


FAILING_DISK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int bad(int fd, const char *word) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return strstr(path, word) != NULL;
}
typedef ssize_t (*reader)(int, const struct iovec *, int, off64_t);
typedef ssize_t (*writer)(int, const void *, size_t, off64_t);

static ssize_t failing_preadv(int fd, const struct iovec *v, int n, off64_t at) {
    if (bad(fd, "eio-read")) { errno = EIO; return -1; }
    return ((reader)dlsym(RTLD_NEXT, "preadv64"))(fd, v, n, at);
}
static ssize_t failing_pwrite(int fd, const void *b, size_t n, off64_t at) {
    if (at > 300000 && bad(fd, "eio-write")) { errno = EIO; return -1; }
    return ((writer)dlsym(RTLD_NEXT, "pwrite64"))(fd, b, n, at);
}
ssize_t preadv(int fd, const struct iovec *v, int n, off_t at) { return failing_preadv(fd, v, n, at); }
ssize_t preadv64(int fd, const struct iovec *v, int n, off64_t at) { return failing_preadv(fd, v, n, at); }
ssize_t preadv2(int fd, const struct iovec *v, int n, off_t at, int f) { return failing_preadv(fd, v, n, at); }
ssize_t preadv64v2(int fd, const struct iovec *v, int n, off64_t at, int f) { return failing_preadv(fd, v, n, at); }
typedef ssize_t (*plain)(int, void *, size_t, off64_t);
ssize_t pread64(int fd, void *b, size_t n, off64_t at) {
    if (bad(fd, "eio-read")) { errno = EIO; return -1; }
    return ((plain)dlsym(RTLD_NEXT, "pread64"))(fd, b, n, at);
}
ssize_t pread(int fd, void *b, size_t n, off_t at) { return pread64(fd, b, n, at); }
ssize_t pwrite(int fd, const void *b, size_t n, off_t at) { return failing_pwrite(fd, b, n, at); }
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t at) { return failing_pwrite(fd, b, n, at); }
"""

STAGE = """
import sys
from pathlib import Path
from tests.data.staging import RecordingSink, dataset, stager
from supertuner.core.errors import SuperTunerError
sink = RecordingSink()
try:
    result = stager(Path(sys.argv[2]), sink).stage(dataset(Path(sys.argv[1])))
    print(result.files, sink.set_aside())
except SuperTunerError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def failing_disk(tmp_path_factory):
    """A library that makes reads of `eio-read` files and late writes below `eio-write` folders fail."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = write(tmp_path_factory.mktemp("eio"), {"eio.c": FAILING_DISK})
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(folder / "eio.so"), str(folder / "eio.c"), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "eio.so"


def staged_on(library, folder, home):
    done = subprocess.run(
        [sys.executable, "-c", STAGE, str(folder), str(home)],
        env={**os.environ, "LD_PRELOAD": str(library)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_an_unreadable_file_on_a_failing_disk_is_set_aside(tmp_path, failing_disk):
    folder = write(tmp_path / "set", pictures(30) | {"eio-read.jpg": picture()})
    output = staged_on(failing_disk, folder, tmp_path / "home")
    assert output.startswith("30 ") and "'eio-read.jpg': 'unreadable: Input/output error'" in output


def test_a_failing_disk_of_the_arena_is_named_and_no_arena_remains(tmp_path, failing_disk):
    folder = write(tmp_path / "set", pictures(200))
    home = tmp_path / "eio-write" / "home"
    output = staged_on(failing_disk, folder, home)
    assert output.startswith("ArenaError") and "Input/output error" in output and str(home) in output
    assert names(home) == []
