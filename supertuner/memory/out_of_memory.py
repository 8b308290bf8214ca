"""Explains a full device memory (what did not fit, which settings need less), and releases unused memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from supertuner.core.errors import TrainError


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

    Modules are in reference cycles: without a collection, an expert that was loaded for samples would stay on the
    device until Python happens to collect, and the next validation would load another.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
