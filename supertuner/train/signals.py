"""Turns signals to a training process into flags that the loop reads between windows.

SIGINT, SIGTERM, and SIGHUP (the terminal was closed): save and stop after this window. SIGUSR1: validate after this
window. A second SIGINT stops at once, like Ctrl-C elsewhere: the last checkpoint stays intact, and a resumed run
computes again what came after it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

from supertuner.core.interrupts import STOP_SIGNALS, raise_interrupt

STOP_MESSAGE = b"\nsaving and stopping after this window; press Ctrl-C again to stop at once, without saving\n"
STANDARD_ERROR = 2


class TrainingSignals:
    """Handles the signals inside its `with` block, and restores the previous handlers.

    Python lets only the main thread handle signals: in another thread the process keeps its own handlers, and the flags
    stay unset.
    """

    def __init__(self, *, announces: bool = True) -> None:
        """`announces` is false in processes whose launcher passes the signal to another one, which prints for all."""
        self._announces = announces
        self.stop_number = 0
        """Number of the signal that requested to save and stop; 0 if there was none."""
        self._validate = False
        self._interrupt_count = 0
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def pop_validate_request(self) -> bool:
        """Whether SIGUSR1 came since the last call."""
        requested, self._validate = self._validate, False
        return requested

    def __enter__(self) -> TrainingSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        handlers = {**dict.fromkeys(STOP_SIGNALS, self._on_stop), signal.SIGUSR1: self._on_validate}
        for number, handler in handlers.items():
            previous = signal.getsignal(number)
            # A signal that the parent process set to be ignored stays ignored, e.g. in a background job of a script.
            if previous is not signal.SIG_IGN and previous is not None:
                self._previous_handlers[number] = previous
                signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous_handlers.items():
            signal.signal(number, previous)
        self._previous_handlers.clear()

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupt_count += 1
            if self._interrupt_count > 1:
                raise_interrupt(KeyboardInterrupt())
        if not self.stop_number:
            self.stop_number = int(number)
            if self._announces:
                # To the descriptor itself: the handler may run inside another print.
                with contextlib.suppress(OSError):  # stderr may be closed
                    os.write(STANDARD_ERROR, STOP_MESSAGE)

    def _on_validate(self, number: int, frame: FrameType | None) -> None:
        self._validate = True
