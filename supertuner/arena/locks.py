"""Who uses an arena, by flock only: a lock ends with its owner, whatever ended it.

On an arena's folder: shared by everyone who builds, writes or reads; exclusive to remove it.
On `builder`: exclusive while a build goes on. On `head`: shared for the moment in which a writer opens its segment,
exclusive while the arena is sealed. On `NNNN.journal`: exclusive while that segment has a writer.
Others probe by taking a lock for an instant, so every wait lasts at least GRACE_S before it gives up.
"""

from __future__ import annotations

import fcntl
import os
import time

GRACE_S = 0.25
_POLL_S = 0.002


def try_lock(fd: int, *, exclusive: bool) -> bool:
    """Lock now, or say that somebody holds it. A failed change from shared to exclusive may lose the shared lock."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(fd: int, *, exclusive: bool, wait_s: float = 0.0) -> bool:
    """Lock within `wait_s`, at least GRACE_S."""
    deadline = time.monotonic() + max(wait_s, GRACE_S)
    while not try_lock(fd, exclusive=exclusive):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)


def is_held(fd: int) -> bool:
    """Whether anyone else holds any lock on this file or folder."""
    if not try_lock(fd, exclusive=True):
        return True
    unlock(fd)
    return False


def leads_to(fd: int, path: str) -> bool:
    """Whether `path` still leads to the file that was opened: it may have been replaced before the lock was had."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(status, os.fstat(fd))
