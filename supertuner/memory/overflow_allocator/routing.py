"""Routes torch's allocations to a pool: those of every thread, or, if torch is not as expected, those of the calling
thread.

The call that routes the whole process is private to torch. It is used only for known torch versions with the known
signature, and only after an allocation on another thread was seen to arrive. Otherwise the public thread-local call is
used, with autograd kept on the calling thread.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, TypeAlias

import torch

OLDEST_TORCH: Final = (2, 13)
"""Earlier versions held back every block that a second stream had used for as long as allocations were routed."""
NEWEST_TORCH: Final = (2, 15)
"""The latest version with which the private call was tested."""


class ProcessWideRoute:
    """Routes every thread and stream of the process, including autograd's threads, to one pool at a time."""

    description = "every thread's allocations"

    def __init__(self, device: int) -> None:
        self._device = device

    def begin(self, pool: torch.cuda.MemPool) -> None:
        _torch_c_function("_cuda_beginAllocateToPool")(self._device, pool.id)

    def end(self, pool: torch.cuda.MemPool) -> None:
        _torch_c_function("_cuda_endAllocateToPool")(self._device, pool.id)
        _torch_c_function("_cuda_releasePool")(self._device, pool.id)  # each begin adds a reference to the pool

    def switch(self, before: torch.cuda.MemPool, after: torch.cuda.MemPool) -> None:
        """Change from one pool to another. Every allocation is routed to one of the two at any time."""
        self.begin(after)  # torch uses the pool that began first, so nothing changes until `end`
        self.end(before)

    def close(self) -> None:
        """Restore torch's previous state."""


class ThreadLocalRoute:
    """Routes the calling thread. Autograd stays on it, so that backward is routed as well."""

    description = "allocations of this thread, on which autograd's backward then runs too"

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
        self.end(before)  # only this thread is routed, and it is executing this method
        self.begin(after)

    def close(self) -> None:
        self._multithreading.__exit__(None, None, None)


AllocationRoute: TypeAlias = ProcessWideRoute | ThreadLocalRoute


def parse_version(text: str) -> tuple[int, int]:
    """`2.13.0+cu130` → (2, 13)."""
    match = re.match(r"(\d+)\.(\d+)", text)
    assert match is not None, text
    return int(match[1]), int(match[2])


def process_wide_problem(version: str, begin_function: object) -> str | None:
    """Why the private call cannot be used; None if version and signature are known."""
    if begin_function is None:
        return f"torch {version} has no _cuda_beginAllocateToPool"
    if not OLDEST_TORCH <= parse_version(version) <= NEWEST_TORCH:
        tested = f"{version_text(OLDEST_TORCH)} to {version_text(NEWEST_TORCH)}"
        return f"torch {version} is not among the tested versions ({tested})"
    # pybind11 writes the signature into the docstring; there is no other way to inspect it.
    signature = begin_function.__doc__ or ""
    expected = r"\w+\((?:\w+: )?(?:self, )?arg0: [^,]+, arg1: [Tt]uple\[.*\]\) -> None"
    if not re.match(expected, signature) or "arg2" in signature:
        return f"torch {version} changed the signature of _cuda_beginAllocateToPool"
    return None


def other_thread_is_routed(device: int, request_count: Callable[[], int]) -> bool:
    """Whether an allocation on another thread reaches the plugin, whose requests `request_count` returns."""
    before = request_count()
    thread = threading.Thread(target=_allocate, args=(device,), name="overflow-proof")
    thread.start()
    thread.join()
    return request_count() > before


def this_thread_is_routed(device: int, request_count: Callable[[], int]) -> bool:
    """Whether an allocation on this thread reaches the plugin."""
    before = request_count()
    _allocate(device)
    return request_count() > before


def _allocate(device: int) -> None:
    # A refused allocation has reached the plugin as well.
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(1, device=f"cuda:{device}")


def _torch_c_function(name: str) -> Any:
    return getattr(torch._C, name)


def torch_begin_function() -> object | None:
    """torch's private function, or None if it or one of the functions that undo it is missing."""
    can_undo = hasattr(torch._C, "_cuda_endAllocateToPool") and hasattr(torch._C, "_cuda_releasePool")
    return getattr(torch._C, "_cuda_beginAllocateToPool", None) if can_undo else None


def version_text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
