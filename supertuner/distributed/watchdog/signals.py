"""Signals that end a process, as errors of its main thread: a launcher sends them to all processes when one has failed,
and then that one is to be named."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""What launchers pass on: SIGHUP when their terminal is closed."""
_NAMES = {128 + number: number.name for number in ENDING}
"""By exit code."""


class terminable:
    """Inside, those of the signals that nobody else handles end the block with SystemExit."""

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        self._ours = [number for number in ENDING if main and signal.getsignal(number) is signal.SIG_DFL]
        self._have(_raise)
        return self

    def ignore(self) -> None:
        self._have(signal.SIG_IGN)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._have(signal.SIG_DFL)

    def _have(self, handler: object) -> None:
        for number in self._ours:
            signal.signal(number, handler)  # type: ignore[arg-type]


def signal_of(error: BaseException) -> str | None:
    """The signal that such an error stands for."""
    return _NAMES.get(error.code) if isinstance(error, SystemExit) and isinstance(error.code, int) else None


def _raise(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
