"""What became of hints: one word of six, the reason, the range asked for and the ranges touched; and how often.

Reasons are few and carry no figures, so that a run of a million hints is told in a handful of lines.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from supertuner.memory.driver import AddressRange


class HintStatus(StrEnum):
    APPLIED = "applied"
    """Done, and read back as asked, or seen in place."""
    UNVERIFIED = "applied-unverified"
    """The driver took it, and nothing can tell more."""
    NO_EFFECT = "no-effect"
    """There is nothing to do, or doing it is documented to change nothing."""
    UNSUPPORTED = "unsupported"
    """This memory, this machine or this kind of tensor cannot do it at all."""
    REFUSED = "refused"
    """It could be done elsewhere or at another time, and was not."""
    ERROR = "error"
    """Something is wrong: the driver failed, or reads back what was not asked."""

    __hash__ = str.__hash__  # an Enum's own is a Python function, and every hint is counted by its status


@dataclass(frozen=True, slots=True)
class HintOutcome:
    """What became of one request."""

    status: HintStatus
    reason: str
    requested: AddressRange | None = None
    """From the first byte of the tensor to its last; None: it has no address, or several."""
    applied_to: tuple[AddressRange, ...] = ()
    """What the driver was really told: whole pages, and only those that belong to the tensor alone."""

    @property
    def accepted(self) -> bool:
        """Whether the driver took the hint."""
        return self.status in (HintStatus.APPLIED, HintStatus.UNVERIFIED)


OutcomeCounts: TypeAlias = Counter[tuple[HintStatus, str]]
"""Status and reason → how many hints."""

# A tensor of several parts is what became of its worst part.
WORST_FIRST = (
    HintStatus.ERROR,
    HintStatus.REFUSED,
    HintStatus.UNSUPPORTED,
    HintStatus.UNVERIFIED,
    HintStatus.APPLIED,
    HintStatus.NO_EFFECT,
)


def combine_outcomes(outcomes: Sequence[HintOutcome]) -> HintOutcome:
    """What became of a tensor that is made of others."""
    assert outcomes, "a tensor has at least one part"
    if len(outcomes) == 1:
        return outcomes[0]
    worst = min(outcomes, key=lambda outcome: WORST_FIRST.index(outcome.status))
    same = all((one.status, one.reason) == (worst.status, worst.reason) for one in outcomes)
    reason = worst.reason if same else f"a part of it: {worst.reason}"
    return HintOutcome(worst.status, reason, None, tuple(span for one in outcomes for span in one.applied_to))


@dataclass(frozen=True, slots=True)
class BatchHintSummary:
    """What became of the hints for one batch, the most frequent first."""

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
        """The most frequent."""
        return self.rows[0][0] if self.rows else HintStatus.NO_EFFECT

    @property
    def reason(self) -> str:
        """The most frequent."""
        return self.rows[0][1] if self.rows else "no tensor in it"


class HintTally:
    """Counts over a run. May be added to from several threads."""

    def __init__(self) -> None:
        self._counts: OutcomeCounts = Counter()
        self._lock = threading.Lock()

    def add(self, result: HintOutcome | BatchHintSummary | OutcomeCounts) -> None:
        with self._lock:
            if isinstance(result, HintOutcome):
                self._counts[result.status, result.reason] += 1
            else:
                self._counts.update(result.counts if isinstance(result, BatchHintSummary) else result)

    def counts(self) -> OutcomeCounts:
        with self._lock:
            return Counter(self._counts)

    def by_status(self) -> dict[str, int]:
        """For telemetry: the statuses that occurred."""
        sums: Counter[str] = Counter()
        for (status, _), count in self.counts().items():
            sums[status.value] += count
        return dict(sums)

    def lines(self) -> list[str]:
        """For the summary, the most frequent first: `applied: read back as asked (96)`."""
        return [
            f"{status}: {reason} ({count:,})"
            for status, reason, count in BatchHintSummary.from_counts(self.counts()).rows
        ]
