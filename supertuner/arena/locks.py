"""The locks that show who uses an arena. All are flock locks: the kernel releases them when their owner ends for any
reason.

- Arena folder: shared by every process that builds, writes or reads; exclusive to remove the arena.
- `builder`: exclusive while a build is in progress.
- `head`: shared while a writer opens its segment; exclusive while the arena is being sealed.
- `NNNN.journal`: exclusive while that segment has a writer.

A process tests a lock by taking it for an instant, so every attempt lasts at least GRACE_S before it gives up.
"""

from __future__ import annotations

import fcntl
import time

GRACE_S = 0.25
_POLL_S = 0.002


def try_lock(fd: int, *, exclusive: bool) -> bool:
    """Try to lock without waiting; False if another process holds the lock.

    A failed change from shared to exclusive may lose the shared lock.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(fd: int, *, exclusive: bool, wait_s: float = 0.0) -> bool:
    """Try to lock for `wait_s` seconds, at least GRACE_S; False if that failed."""
    deadline = time.monotonic() + max(wait_s, GRACE_S)
    while not try_lock(fd, exclusive=exclusive):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)


def is_held(fd: int) -> bool:
    """Whether another process holds any lock on this file or folder."""
    if not try_lock(fd, exclusive=True):
        return True
    unlock(fd)
    return False
