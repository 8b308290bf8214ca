"""Starts child processes in milliseconds, forked from a server that has imported the libraries and computed nothing.

A child forked from a process that has computed may deadlock in OpenMP or MKL, because it lacks their threads.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tests.train.encoding.encoding_helpers", "tests.distributed.warm"])


def begin(work: Callable[..., None], *arguments: object) -> ForkServerProcess:
    """Run `work(*arguments)` in a child process; `work` is a module-level function and the arguments are picklable."""
    child = _server.Process(target=work, args=arguments, daemon=True)
    child.start()
    return child


def kill(child: ForkServerProcess) -> int:
    """Kill the child. Returns its exit code, which is 0 if it had already ended."""
    assert child.pid is not None
    if child.exitcode is None:
        os.kill(child.pid, signal.SIGKILL)
    return ended(child)


def ended(child: ForkServerProcess) -> int:
    """Wait for the child and return its exit code. If the wait is interrupted, the child is killed."""
    try:
        child.join()
    except BaseException:
        child.kill()
        raise
    assert child.exitcode is not None
    return child.exitcode
