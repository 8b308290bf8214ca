"""Which errors say no more than that another process is not there any more."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

TORCH_DISTRIBUTED_PREFIX = os.path.dirname(dist.__file__) + os.sep


def is_collective_failure(error: BaseException) -> bool:
    """Whether a collective failed: the error, or what it came from, was raised inside torch.distributed. What fails
    there for want of memory is this process's own."""
    return any(
        isinstance(one, RuntimeError) and not _is_out_of_memory(one) and _from_collective(one)
        for one in _cause_chain(error)
    )


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Of host memory torch says so in words only."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def _from_collective(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(TORCH_DISTRIBUTED_PREFIX):
            return True
        trace = trace.tb_next
    return isinstance(error, dist.DistError)


def _cause_chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
