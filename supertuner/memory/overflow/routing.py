"""Which allocations of torch reach a pool: those of every thread, or, where torch is not as expected, of this one.

The call that routes the whole process is private to torch, so it is used only for versions and a signature that are
known, and only after an allocation on another thread has been seen to arrive. Otherwise the public, thread-local way is
taken, with autograd kept on the thread that calls it.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch

OLDEST_TORCH: Final = (2, 13)
"""Before, torch held back every block that a second stream had used for as long as allocations were routed."""
NEWEST_TORCH: Final = (2, 15)
"""The last version on which the private call was tried."""


class AllocationRoute(Protocol):
    """Sends allocations to one pool at a time."""

    description: str

    def begin(self, pool: torch.cuda.MemPool) -> None: ...

    def end(self, pool: torch.cuda.MemPool) -> None: ...

    def switch(self, before: torch.cuda.MemPool, after: torch.cuda.MemPool) -> None:
        """From one pool to another, with no moment in between in which an allocation is not routed."""

    def close(self) -> None:
        """Leave torch as it was found."""


class ProcessWideRoute:
    """Every thread and stream of the process, autograd's threads included."""

    description = "every thread's allocations"

    def __init__(self, device: int) -> None:
        self._device = device

    def begin(self, pool: torch.cuda.MemPool) -> None:
        _torch_c_function("_cuda_beginAllocateToPool")(self._device, pool.id)

    def end(self, pool: torch.cuda.MemPool) -> None:
        _torch_c_function("_cuda_endAllocateToPool")(self._device, pool.id)
        _torch_c_function("_cuda_releasePool")(self._device, pool.id)  # each begin holds the pool once

    def switch(self, before: torch.cuda.MemPool, after: torch.cuda.MemPool) -> None:
        self.begin(after)  # torch asks the pool that was begun first, so nothing changes yet
        self.end(before)

    def close(self) -> None:
        pass


class ThreadLocalRoute:
    """The calling thread; autograd is kept on it, so that backward is routed as well."""

    description = "this thread's allocations, with autograd kept on it"

    def __init__(self, device: int) -> None:
        self._device = device
        self._pool_context: AbstractContextManager[None] | None = None
        self._multithreading = torch.autograd.set_multithreading_enabled(False)

    def begin(self, pool: torch.cuda.MemPool) -> None:
        assert self._pool_context is None, "one pool at a time"
        self._pool_context = torch.cuda.use_mem_pool(pool, self._device)
        self._pool_context.__enter__()

    def end(self, pool: torch.cuda.MemPool) -> None:
        assert self._pool_context is not None, "nothing is routed"
        self._pool_context.__exit__(None, None, None)
        self._pool_context = None

    def switch(self, before: torch.cuda.MemPool, after: torch.cuda.MemPool) -> None:
        self.end(before)  # only this thread is routed, and it is here
        self.begin(after)

    def close(self) -> None:
        self._multithreading.__exit__(None, None, None)


def parse_version(text: str) -> tuple[int, int]:
    """`2.13.0+cu130` → (2, 13)."""
    match = re.match(r"(\d+)\.(\d+)", text)
    assert match is not None, text
    return int(match[1]), int(match[2])


def process_wide_problem(version: str, begin_function: object) -> str | None:
    """Why the private call may not be used; None: version and signature are known."""
    if begin_function is None:
        return f"torch {version} has no _cuda_beginAllocateToPool"
    if not OLDEST_TORCH <= parse_version(version) <= NEWEST_TORCH:
        return f"torch {version} is none of those that were tried ({_version_text(OLDEST_TORCH)} to {_version_text(NEWEST_TORCH)})"
    signature = re.match(
        r"\w+\((?:\w+: )?(?:self, )?arg0: [^,]+, arg1: [Tt]uple\[.*\]\) -> None", begin_function.__doc__ or ""
    )
    if signature is None or "arg2" in (begin_function.__doc__ or ""):
        return f"torch {version} changed the signature of _cuda_beginAllocateToPool"
    return None


def other_thread_is_routed(device: int, request_count: Callable[[], int]) -> bool:
    """Whether an allocation on another thread reaches the plugin, which counts `arrivals`."""
    before = request_count()
    thread = threading.Thread(target=_allocate, args=(device,), name="overflow-proof")
    thread.start()
    thread.join()
    return request_count() > before


def this_thread_is_routed(device: int, request_count: Callable[[], int]) -> bool:
    """Whether one on this thread does."""
    before = request_count()
    _allocate(device)
    return request_count() > before


def _allocate(device: int) -> None:
    # A refusal is an arrival as well: the plugin was asked.
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(1, device=f"cuda:{device}")


def _torch_c_function(name: str) -> Any:
    return getattr(torch._C, name)


def torch_begin_function() -> object | None:
    """Torch's private function, if it is there, and those that undo it."""
    can_undo = hasattr(torch._C, "_cuda_endAllocateToPool") and hasattr(torch._C, "_cuda_releasePool")
    return getattr(torch._C, "_cuda_beginAllocateToPool", None) if can_undo else None


def _version_text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
