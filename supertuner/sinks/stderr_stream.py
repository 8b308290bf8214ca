"""Standard error for displays: once nobody can see it, what is shown goes nowhere and the work goes on.

A terminal is closed, a pipe's reader ends, a log's disk is full: hours of training do not end for that. What happened
is in the run's own files.
"""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from typing import IO


class StderrStream(io.TextIOBase):
    """Whatever standard error is at the moment."""

    def write(self, text: str, /) -> int:
        with suppress(OSError):  # nobody is there to see it
            _real_stderr().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):  # likewise
            _real_stderr().flush()

    def isatty(self) -> bool:
        return _real_stderr().isatty()

    def fileno(self) -> int:
        return _real_stderr().fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute there
        return sys.stderr.encoding or "utf-8"


def _real_stderr() -> IO[str]:
    """Not what rich puts in its place while a display is live: that writes to the display, and it to us."""
    stream: IO[str] = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    return stream
