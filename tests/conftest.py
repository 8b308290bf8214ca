"""What holds for the whole suite: processes that computed can be forked, and garbage is looked for only among what the
running test made.

MKL keeps buffers by thread; in a child of a process that computed with several, whoever asks for one may spin for ever
(seen in `mm_account_ptr_by_tid`, in attention in bf16). Without its own memory manager it does not.

Runs collect garbage whenever they drop a model. With all libraries imported that means to look through millions of
objects which are none, each time: a third of the suite's time. So what lives when a test begins is set aside.
"""

from __future__ import annotations

import gc
import os

os.environ["MKL_DISABLE_FAST_MM"] = "1"  # before torch is imported; children inherit it


def pytest_runtest_logstart(nodeid: str, location: tuple[str, int | None, str]) -> None:
    """Before anything of a test is made: what earlier ones left is freed, and what lives on is not looked at again.
    On the phantom it is: its tests count what is left of memory, and what is set aside is never freed."""
    gc.collect()
    if not nodeid.startswith("tests/phantom"):
        gc.freeze()
