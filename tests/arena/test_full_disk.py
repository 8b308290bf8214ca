"""Memory or disk that is full or fails while an arena is built: a clear error, and no files are left behind."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from supertuner.arena.home import HOME_MARKER, ArenaHome
from supertuner.core.errors import ArenaFullError
from tests.arena.arena_helpers import contents, fresh_home

BUILD = """
import sys
from pathlib import Path
from supertuner.arena.home import ArenaHome
from supertuner.core.errors import ArenaError, ArenaFullError

try:
    with ArenaHome(Path(sys.argv[1])).build("a") as arena_build:
        writer = arena_build.open_writer()
        for number in range(20):
            with writer.begin(f"{number}") as unit:
                unit.put("media", b"x" * 10_000)
        arena_build.seal({})
except ArenaError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[ArenaHome]:
    """A home on a tmpfs of one megabyte."""
    place = tmp_path / "small"
    place.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", place], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small tmpfs here: {mounted.stderr.strip()}")
    try:
        yield ArenaHome(place)
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_full_file_system_raises_an_error_with_a_remedy_and_leaves_no_files(small: ArenaHome) -> None:
    expected = r"0000\.data: No space left .* left in .*arena rm.*arena\.home"
    with pytest.raises(ArenaFullError, match=expected), small.build("a") as arena_build:
        writer = arena_build.open_writer()
        for number in range(1000):
            with writer.begin(f"{number}") as unit:
                unit.put("media", os.urandom(50_000))
    assert os.listdir(small.path) == [HOME_MARKER]
    assert os.statvfs(small.path).f_bfree == os.statvfs(small.path).f_blocks, "every page was freed"


def test_units_committed_before_the_disk_was_full_can_be_sealed(small: ArenaHome) -> None:
    with small.build("a") as arena_build:
        writer, committed = arena_build.open_writer(), {}
        with pytest.raises(ArenaFullError):
            for number in range(1000):
                with writer.begin(f"{number}") as unit:
                    unit.put("media", bytes([number]) * 50_000)
                committed[f"{number}"] = bytes([number]) * 50_000
        with pytest.raises(ArenaFullError), writer.begin("again") as unit:
            unit.put("media", os.urandom(1 << 20))
        arena_build.seal({})
    assert len(committed) > 5 and contents(small, "a") == committed


def test_a_build_whose_writer_cannot_start_can_be_abandoned(small: ArenaHome) -> None:
    filler = os.open(small.path / ".filler", os.O_RDWR | os.O_CREAT)
    with small.build("a") as arena_build:
        with pytest.raises(OSError):
            os.pwrite(filler, b"x" * (2 << 20), 0) < (2 << 20) and os.pwrite(filler, b"x" * 4096, 2 << 20)
        with pytest.raises(ArenaFullError):
            arena_build.open_writer().begin("k").put("media", b"x" * 100_000)
    os.close(filler)
    assert sorted(os.listdir(small.path)) == [".filler", HOME_MARKER]


@pytest.fixture(scope="module")
def failing_io(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the library that makes writes fail")
    library = tmp_path_factory.mktemp("preload") / "failing_io.so"
    source = Path(__file__).with_name("failing_io.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.mark.parametrize(
    ("path", "after", "code", "expected"),
    [
        ("0000.data", 7, errno.EIO, "ArenaError"),
        ("0000.journal", 7, errno.EIO, "ArenaError"),
        ("index", 3, errno.EIO, "ArenaError"),
        ("head", 0, errno.EIO, "ArenaError"),
        ("0000.data", 21, errno.EIO, "ArenaError"),  # the fsync before the index
        ("index", 0, errno.ENOSPC, "ArenaFullError"),
        ("0000.journal", 3, errno.EDQUOT, "ArenaFullError"),
    ],
)
def test_a_failing_disk_raises_an_error_that_names_the_file(
    failing_io: Path, path: str, after: int, code: int, expected: str
) -> None:
    failure = {"FAIL_PATH": path, "FAIL_AFTER": str(after), "FAIL_ERRNO": str(code), "LD_PRELOAD": str(failing_io)}
    root = str(Path(__file__).parents[2])
    with fresh_home() as home:
        ran = subprocess.run(
            [sys.executable, "-c", BUILD, home.path],
            env={"PYTHONPATH": root, "PATH": os.defpath, **failure},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 1
        assert ran.stderr.startswith(f"{expected}: {home.path}/a/{path}: "), ran.stderr
        assert os.strerror(code) in ran.stderr and "arena.home" in ran.stderr
        assert os.listdir(home.path) == [HOME_MARKER]
