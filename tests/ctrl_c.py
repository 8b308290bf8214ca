"""Sends this process SIGINT at a chosen moment: Python's profile hook sees every call and return of the main thread."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias

READS_TENSOR = "UntypedStorage.__getitem__"
"""Safetensors calls this function of torch for each tensor, and turns whatever it raises into a ValueError."""

Moment: TypeAlias = Callable[[FrameType, str, Any], bool]
"""Whether this event of the hook is the moment: (frame, kind of event, the C function or the returned value)."""


def call_of(name: str) -> Moment:
    """Each call of the Python function with this qualified name."""
    return lambda frame, event, argument: event == "call" and frame.f_code.co_qualname == name


def return_from(function: Callable[..., Any]) -> Moment:
    """Each return of this C function."""
    return lambda frame, event, argument: event == "c_return" and argument is function


class CtrlC:
    """The signal and its moment."""

    def __init__(self, moment: Moment, number: int = 1, on_sent: Callable[[], object] = lambda: None) -> None:
        """`number`: which of the moments it is. `on_sent` is called just before the signal is sent."""
        self._moment, self._left, self._on_sent = moment, number, on_sent
        self.sent = False

    def start(self) -> None:
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._moment(frame, event, argument):
            self._left -= 1
            if self._left == 0:
                sys.setprofile(None)
                self.sent = True
                self._on_sent()
                signal.raise_signal(signal.SIGINT)


@contextmanager
def ctrl_c_at(moment: Moment, number: int = 1) -> Iterator[CtrlC]:
    """Inside the block the signal is sent at the `number`-th such moment, once."""
    ctrl_c = CtrlC(moment, number)
    ctrl_c.start()
    try:
        yield ctrl_c
    finally:
        sys.setprofile(None)
