"""Tests on the phantom: torch's real CUDA build on fake libraries. Elsewhere they are not collected.

`make test-phantom` runs them; scripts/phantom_python.sh sets the variables that must be set before a process starts.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ON_PHANTOM = "FAKECUDA_PHANTOM" in os.environ
collect_ignore_glob = [] if ON_PHANTOM else ["test_*.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file that is named on the command line is collected all the same: its tests are deselected, with the reason."""
    requires = pytest.mark.requires(ON_PHANTOM, reason="needs CUDA tensors; run `make test-phantom`")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(requires)


@pytest.fixture(autouse=True)
def emptied_gpu() -> Iterator[None]:
    """Each test begins with nothing cached and peaks at zero, so that it may count bytes."""
    import torch

    if ON_PHANTOM:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # kept for each thread's handle, in the pool of whoever came first
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
    yield
