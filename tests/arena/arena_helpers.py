"""Creates homes and small arenas for tests: on tmpfs where available, deleted afterwards."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from supertuner.arena.home import ArenaHome


@contextmanager
def fresh_home() -> Iterator[ArenaHome]:
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="supertuner-test-", dir=parent))
    try:
        yield ArenaHome(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def units(count: int, seed: int = 0) -> dict[str, bytes]:
    """Keys and payloads of many sizes: empty, part of a page, whole pages, 64 KiB and more."""
    rng = random.Random(seed)
    sizes = (0, 1, 100, 4095, 4096, 4097, 9000, 65536, 70000)
    return {f"folder/{rng.getrandbits(32):08x}-{i}": rng.randbytes(sizes[i % len(sizes)]) for i in range(count)}


def build(home: ArenaHome, name: str, content: dict[str, bytes], writers: int = 2) -> None:
    """Build a sealed arena of `content`, with a table."""
    with home.build(name) as arena_build:
        segment_writers = [arena_build.open_writer() for _ in range(writers)]
        for number, (key, payload) in enumerate(content.items()):
            with segment_writers[number % writers].begin(key) as unit:
                unit.put("media", payload)
        arena_build.put_table("lengths", np.array([len(p) for p in content.values()], np.int32))
        arena_build.seal({"made": "by a test"})


def contents(home: ArenaHome, name: str) -> dict[str, bytes]:
    with home.attach(name) as reader:
        reader.verify()
        return {reader.key(i): bytes(reader.view(i)) for i in range(len(reader))}


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a forked child, which never returns here; return its pid. The child starts within a millisecond.

    It must not compute: torch's libraries may deadlock in a child of a process that computed (see `tests/children.py`).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of numpy's libraries; the child uses none
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - the child reports it before _exit
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(pid: int) -> int:
    """The exit code of a child. If the test is interrupted, the child is killed."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
