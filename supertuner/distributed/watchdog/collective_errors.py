"""Which errors say no more than that another process is not there any more."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

COLLECTIVES = os.path.dirname(dist.__file__) + os.sep


def is_broken_connection(error: BaseException) -> bool:
    """Whether a collective failed: the error, or what it came from, was raised inside torch.distributed. What fails
    there for want of memory is this process's own."""
    return any(
        isinstance(one, RuntimeError) and not _wants_memory(one) and _from_collective(one) for one in _chain(error)
    )


def _wants_memory(error: RuntimeError) -> bool:
    """Of host memory torch says so in words only."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def _from_collective(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(COLLECTIVES):
            return True
        trace = trace.tb_next
    return isinstance(error, dist.DistError)


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__
