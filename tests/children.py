"""Child processes that compute: forked in milliseconds, from a process that has the libraries and never used them.

A child of a process that computed may wait for ever in OpenMP or in MKL, whose threads it does not have.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tests.train.encoding.encoding_helpers", "tests.distributed.warm"])


def begin(work: Callable[..., None], *of: object) -> ForkServerProcess:
    """`work(*of)` in a child process; `work` is a function of a module, and `of` can be pickled."""
    child = _server.Process(target=work, args=of, daemon=True)
    child.start()
    return child


def kill(child: ForkServerProcess) -> int:
    """Kill it at once; its exit code, 0 if it had ended before."""
    assert child.pid is not None
    if child.exitcode is None:
        os.kill(child.pid, signal.SIGKILL)
    return ended(child)


def ended(child: ForkServerProcess) -> int:
    """Wait for it; its exit code. It is not left behind where the test is ended before."""
    try:
        child.join()
    except BaseException:
        child.kill()
        raise
    assert child.exitcode is not None
    return child.exitcode
