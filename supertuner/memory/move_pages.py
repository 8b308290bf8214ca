"""Where the kernel says that pages are: `move_pages(2)` in its asking form, which moves nothing."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable, Sequence
from typing import TypeAlias

MovePages: TypeAlias = Callable[[Sequence[int]], list[int]]
"""Addresses -> the NUMA node of each page, or a negative errno: -ENOENT for a page that was never touched."""

_SYSCALL_NUMBERS = {"x86_64": 279, "aarch64": 239}


def kernel_move_pages(addresses: Sequence[int]) -> list[int]:
    """Asked by number: glibc has no such function, and libnuma is one dependency more.

    A kernel that will not say (built without NUMA, or a sandbox that forbids the call) answers -ENOSYS for every page.
    """
    number = _SYSCALL_NUMBERS.get(platform.machine())
    if number is None or not addresses:
        return [-errno.ENOSYS] * len(addresses)
    count = len(addresses)
    pages = (ctypes.c_void_p * count)(*addresses)
    status = (ctypes.c_int * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(
        ctypes.c_long(number), ctypes.c_int(0), ctypes.c_ulong(count), pages, None, status, ctypes.c_int(0)
    )
    if result == 0:
        return list(status)
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EPERM, errno.EACCES, errno.ENODEV):
        return [-errno.ENOSYS] * count
    raise OSError(code, f"move_pages: {os.strerror(code)}")
