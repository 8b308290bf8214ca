"""Hooks of the whole suite: which tests apply here, signal handlers for tests of Ctrl-C, and cheap garbage collection.

A test that cannot apply to this machine is deselected, not skipped: it carries `@pytest.mark.requires(condition,
reason="…")`, and the header of the session lists the reasons. A skip therefore means that something is missing that can
be installed (a compiler, strace, a mount).

A shell starts its background jobs with SIGINT ignored, nohup starts its command with SIGHUP ignored, and children
inherit that; tests of Ctrl-C and of a closed terminal need the default handlers.

Training collects garbage whenever it drops a model. With all libraries imported, each collection would traverse
millions of live objects, which took a third of the suite's time. Therefore objects that are alive when a test begins
are frozen (`gc.freeze`), and a collection looks only at objects that the test created.
"""

from __future__ import annotations

import gc
import signal
from collections import Counter
from importlib.util import find_spec

import pytest

EXTENSIONS = ("core._bulk_io", "optim.automagic._automagic", "memory.overflow_allocator._overflow")


def pytest_configure() -> None:
    missing = [name for name in EXTENSIONS if find_spec(f"supertuner.{name}") is None]
    if missing:
        compiled = ", ".join(missing)
        raise pytest.UsageError(
            f"not compiled here: {compiled}; run `make setup`, or `python setup.py build_ext --inplace`"
        )
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests whose `requires` condition is false."""
    reasons = {item: reason for item in items if (reason := _unmet_requirement(item)) is not None}
    if reasons:
        items[:] = [item for item in items if item not in reasons]
        config.hook.pytest_deselected(items=list(reasons))
        config.stash[DESELECTED] = Counter(reasons.values())


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    return [f"{count} deselected: {reason}" for reason, count in config.stash.get(DESELECTED, Counter()).items()]


def pytest_collection_finish() -> None:
    """Freeze everything that importing the tests created."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logstart(nodeid: str, location: tuple[str, int | None, str]) -> None:
    """Before a test creates anything: free what earlier tests left, and freeze what is still alive.

    Tests on the phantom measure remaining memory, and frozen objects are never freed; there nothing is frozen.
    """
    gc.collect()
    if not nodeid.startswith("tests/phantom"):
        gc.freeze()


def _unmet_requirement(item: pytest.Item) -> str | None:
    """The reason of the first `requires` marker whose condition is false; None if the test applies here."""
    for marker in item.iter_markers("requires"):
        (condition,) = marker.args
        if not condition:
            return str(marker.kwargs["reason"])
    return None


DESELECTED = pytest.StashKey[Counter[str]]()
