"""The outcome of a hint: one of six statuses, the reason, the requested range and the ranges it was applied to; and
counts of outcomes.

There are few different reasons and they contain no figures, so that a run with a million hints is summarised in a
handful of lines.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from supertuner.core.types import JSON
from supertuner.memory.driver import AddressRange


class HintStatus(StrEnum):
    APPLIED = "applied"
    """Applied, and confirmed by reading it back or by locating the pages."""
    UNVERIFIED = "applied-unverified"
    """The driver accepted it, and nothing can confirm the effect."""
    NO_EFFECT = "no-effect"
    """There is nothing to do, or the hint is documented to have no effect."""
    UNSUPPORTED = "unsupported"
    """This memory, machine or kind of tensor does not support the hint at all."""
    REFUSED = "refused"
    """Not applied now; it could be applied for another range or at another time."""
    ERROR = "error"
    """The driver failed, or reads back something other than the request."""

    __hash__ = str.__hash__  # Enum.__hash__ is a Python function, and every hint is counted by its status


@dataclass(frozen=True, slots=True)
class HintOutcome:
    """The outcome of one request."""

    status: HintStatus
    reason: str
    requested: AddressRange | None = None
    """From the first byte of the tensor to its last; None if it has no address, or several."""
    applied_to: tuple[AddressRange, ...] = ()
    """The ranges that the driver received: whole pages, and only those that hold nothing but this tensor."""

    @property
    def accepted(self) -> bool:
        """Whether the driver accepted the hint."""
        return self.status in (HintStatus.APPLIED, HintStatus.UNVERIFIED)

    def to_dict(self) -> dict[str, JSON]:
        """The outcome as JSON values; ranges as [address, bytes]."""
        requested = None if self.requested is None else [self.requested.address, self.requested.nbytes]
        applied_to = [[span.address, span.nbytes] for span in self.applied_to]
        return {"status": self.status.value, "reason": self.reason, "requested": requested, "applied_to": applied_to}


OutcomeCounts: TypeAlias = Counter[tuple[HintStatus, str]]
"""(status, reason) → number of hints."""

# The outcome of a tensor with several parts is that of its worst part.
WORST_FIRST = (
    HintStatus.ERROR,
    HintStatus.REFUSED,
    HintStatus.UNSUPPORTED,
    HintStatus.UNVERIFIED,
    HintStatus.APPLIED,
    HintStatus.NO_EFFECT,
)


def combine_outcomes(outcomes: Sequence[HintOutcome]) -> HintOutcome:
    """The outcome of a tensor that consists of several tensors."""
    assert outcomes, "a tensor has at least one part"
    if len(outcomes) == 1:
        return outcomes[0]
    worst = min(outcomes, key=lambda outcome: WORST_FIRST.index(outcome.status))
    same = all((outcome.status, outcome.reason) == (worst.status, worst.reason) for outcome in outcomes)
    reason = worst.reason if same else f"for a part of it: {worst.reason}"
    return HintOutcome(worst.status, reason, None, tuple(span for outcome in outcomes for span in outcome.applied_to))


@dataclass(frozen=True, slots=True)
class BatchHintSummary:
    """How often each outcome (status, reason) occurred, the most frequent first: for the tensors of a training batch,
    or over a run."""

    rows: tuple[tuple[HintStatus, str, int], ...]

    @classmethod
    def from_counts(cls, counts: Mapping[tuple[HintStatus, str], int]) -> BatchHintSummary:
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return cls(tuple((status, reason, count) for (status, reason), count in ordered))

    @property
    def counts(self) -> OutcomeCounts:
        return Counter({(status, reason): count for status, reason, count in self.rows})

    @property
    def status(self) -> HintStatus:
        """The most frequent status."""
        return self.rows[0][0] if self.rows else HintStatus.NO_EFFECT

    @property
    def reason(self) -> str:
        """The most frequent reason of that status."""
        return self.rows[0][1] if self.rows else "the batch has no tensors"

    def to_dict(self) -> dict[str, JSON]:
        """`{"rows": [{"status": …, "reason": …, "count": …}, …]}`."""
        rows = [{"status": status.value, "reason": reason, "count": count} for status, reason, count in self.rows]
        return {"rows": rows}


class HintTally:
    """Counts of outcomes over a run. May be used from several threads."""

    def __init__(self) -> None:
        self._counts: OutcomeCounts = Counter()
        self._lock = threading.Lock()

    def add(self, result: HintOutcome | OutcomeCounts) -> None:
        with self._lock:
            self._counts.update([(result.status, result.reason)] if isinstance(result, HintOutcome) else result)

    def counts(self) -> OutcomeCounts:
        with self._lock:
            return Counter(self._counts)

    def by_status(self) -> dict[str, int]:
        """For telemetry: the number of hints by status, for statuses that occurred."""
        sums: Counter[str] = Counter()
        for (status, _), count in self.counts().items():
            sums[status.value] += count
        return dict(sums)

    def lines(self) -> list[str]:
        """For the run summary, the most frequent first: `applied: read back as requested (96)`."""
        rows = BatchHintSummary.from_counts(self.counts()).rows
        return [f"{status}: {reason} ({count:,})" for status, reason, count in rows]
