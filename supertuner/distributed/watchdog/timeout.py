"""A call that may never return, given so long and no longer.

A store whose owner is stopped is asked for ever: torch's own limits hold only for keys that nobody sets.
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
    """What the call returns or raises; TimeoutError if that takes longer. It is left behind then, in a thread that ends
    with the process. Of the time that this process was stopped itself no more than a tick counts."""
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
    except (RuntimeError, ValueError, SuperTunerError) as error:  # torch's of a store, and ours: for whoever waits
        future.set_exception(error)
