"""A device whose memory is full, in our words: what did not fit, and which settings need less; and its release."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from supertuner.core.errors import TrainError


@contextmanager
def explain_out_of_memory(subject: str, remedy: str | Callable[[], str]) -> Iterator[None]:
    """TrainError instead of torch's own, which is a traceback to users and would end a run for a mere sample.

    A remedy that depends on what was refused is asked for when it was.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = (str(error).strip() or "out of memory").splitlines()[0].partition(" Of the allocated memory")[0]
        advice = remedy if isinstance(remedy, str) else remedy()
        raise TrainError(f"{subject} not fit into the device's memory ({reason}); {advice}") from error


def release_unused_memory(device: torch.device) -> None:
    """Give back what nothing uses. Models hold themselves in circles: without this an expert that was loaded for
    samples would stay on the device until Python happens to look, and the next validation would load another."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
