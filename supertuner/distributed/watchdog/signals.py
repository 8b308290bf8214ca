"""Signals that end a process, as errors of its main thread: a launcher sends them to all processes when one has failed,
and then that one is to be named."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""What launchers pass on: SIGHUP when their terminal is closed."""
_NAME_BY_EXIT_CODE = {128 + number: number.name for number in TERMINATION_SIGNALS}
"""By exit code."""


class TerminationSignals:
    """Inside, those of the signals that nobody else handles end the block with SystemExit."""

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        self._handled = [
            number for number in TERMINATION_SIGNALS if main and signal.getsignal(number) is signal.SIG_DFL
        ]
        self._set_handler(_raise_system_exit)
        return self

    def ignore(self) -> None:
        self._set_handler(signal.SIG_IGN)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._set_handler(signal.SIG_DFL)

    def _set_handler(self, handler: object) -> None:
        for number in self._handled:
            signal.signal(number, handler)  # type: ignore[arg-type]


def termination_signal(error: BaseException) -> str | None:
    """The signal that such an error stands for."""
    return _NAME_BY_EXIT_CODE.get(error.code) if isinstance(error, SystemExit) and isinstance(error.code, int) else None


def _raise_system_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
