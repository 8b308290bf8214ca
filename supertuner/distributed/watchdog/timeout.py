"""A time limit for calls that may never return.

A call to a TCPStore whose server is stopped (SIGSTOP) does not return: torch's own timeouts only cover waiting for a
key that no process sets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from supertuner.core.errors import SuperTunerError

Value = TypeVar("Value")
TICK_S = 0.5


def call_with_timeout(seconds: float, call: Callable[[], Value]) -> Value:
    """Return or raise what the call does; TimeoutError if that takes longer than `seconds`.

    After a timeout the call goes on in a daemon thread, which ends with the process. Time during which this process is
    stopped itself counts as one tick at most.
    """
    future: Future[Value] = Future()
    threading.Thread(target=_run_into_future, args=(future, call), name="limited", daemon=True).start()
    while not wait([future], min(seconds, TICK_S)).done:
        seconds -= TICK_S
        if seconds <= 0:
            raise TimeoutError
    return future.result()


def _run_into_future(future: Future[Value], call: Callable[[], Value]) -> None:
    try:
        future.set_result(call())
    except (RuntimeError, ValueError, SuperTunerError) as error:  # torch's errors of a store, and ours: the caller's
        future.set_exception(error)
