"""Residency hints for a batch. Every call returns what happened; here, until the memory engine lands, it is nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import torch


class Status(StrEnum):
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request."""

    status: Status
    reason: str


NO_UNIFIED_MEMORY = Outcome(Status.UNSUPPORTED, "no unified memory here")


def optimize_batch_for_gh200(tensors: Iterable[torch.Tensor]) -> Outcome:
    """Ask that a batch lie where the next step reads it. The trainer asks for every batch, and counts the answers."""
    return NO_UNIFIED_MEMORY
