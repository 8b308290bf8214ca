"""Which errors mean only that another process is no longer there."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from supertuner.core.waiting import failed_operation

TORCH_DISTRIBUTED_PREFIX = os.path.dirname(dist.__file__) + os.sep


def is_collective_failure(error: BaseException) -> bool:
    """Whether a collective failed: the error, or one of its causes, was raised inside torch.distributed, or in a block
    that waits for other ranks. (`Work.wait` raises without a frame of torch.distributed.)

    An error there that reports too little memory, or a fault of this process's own device, does not count.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RuntimeError) and not _is_own_fault(cause) and _from_collective(cause):
            return True
        cause = cause.__cause__
    return False


def _is_own_fault(error: RuntimeError) -> bool:
    """Too little memory, or an error of the device: torch may raise these where this process waits for others.

    For host memory, torch has no exception type: only the message says it.
    """
    return isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError) or "allocate memory" in str(error)


def _from_collective(error: BaseException) -> bool:
    if failed_operation(error) is not None:
        return True
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(TORCH_DISTRIBUTED_PREFIX):
            return True
        trace = trace.tb_next
    return isinstance(error, dist.DistError)
