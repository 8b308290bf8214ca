"""What holds for the whole suite: Ctrl-C works in tests of it, and garbage is looked for only among what the running
test made.

A shell starts its background jobs deaf to SIGINT, nohup its command to SIGHUP, and children inherit that.

Runs collect garbage whenever they drop a model. With all libraries imported that means to look through millions of
objects which are none, each time: a third of the suite's time. So what lives when a test begins is set aside.
"""

from __future__ import annotations

import gc
import signal


def pytest_configure() -> None:
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_finish() -> None:
    """What was imported to get here stays: nobody need look through it again, on the phantom either."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logstart(nodeid: str, location: tuple[str, int | None, str]) -> None:
    """Before anything of a test is made: what earlier ones left is freed, and what lives on is not looked at again.
    On the phantom it is: its tests count what is left of memory, and what is set aside is never freed."""
    gc.collect()
    if not nodeid.startswith("tests/phantom"):
        gc.freeze()
