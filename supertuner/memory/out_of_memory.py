"""Explains a full device memory (what did not fit, which settings need less), and releases unused memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from supertuner.core.errors import TrainError

FROZEN_BY_PYTHON = 10_000
"""Up to this many frozen objects, the program has frozen none: Python 3.12 starts with a few hundred."""


@contextmanager
def explain_out_of_memory(subject: str, remedy: str | Callable[[], str]) -> Iterator[None]:
    """Turn torch.OutOfMemoryError into TrainError: `{subject} not fit into the device's memory (reason); {remedy}`.

    `subject` includes the verb ("samples do"). A callable remedy is evaluated after the error, when it can tell why.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = (str(error).strip() or "out of memory").splitlines()[0].partition(" Of the allocated memory")[0]
        advice = remedy if isinstance(remedy, str) else remedy()
        raise TrainError(f"{subject} not fit into the device's memory ({reason}); {advice}") from error


def release_unused_memory(device: torch.device) -> None:
    """Free memory that nothing uses.

    Modules are in reference cycles, such as an expert that a pipeline has sampled with, or what an error's traceback
    refers to: without a collection they would stay on the device until Python happens to collect.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def releasing_new_objects(device: torch.device) -> Iterator[None]:
    """Like `release_unused_memory` at the end of the block, but only for objects that were created inside it.

    A collection is one long C call, which no signal interrupts: it takes hundreds of milliseconds for the half a
    million objects of imported libraries, and milliseconds for those of the block. The older ones are frozen meanwhile,
    which takes no time. If the program has frozen its objects itself, they stay so, and a full collection is short.
    """
    freezes = gc.get_freeze_count() <= FROZEN_BY_PYTHON
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        release_unused_memory(device)
        if freezes:
            gc.unfreeze()
