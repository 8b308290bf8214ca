"""The arithmetic of progress: how much is done, how fast, how long it will still take. No clock of its own."""

from __future__ import annotations

from dataclasses import dataclass

from supertuner.core.types import bytes_text


@dataclass(slots=True)
class Tally:
    """One phase's counters. A total of zero is unknown, or has no meaning here, and is not shown."""

    title: str
    items_total: int
    bytes_total: int
    begun_s: float
    noun: str = "files"
    items: int = 0
    nbytes: int = 0
    ended_s: float | None = None

    def add(self, items: int, nbytes: int) -> None:
        self.items += items
        self.nbytes += nbytes

    def end(self, now_s: float) -> None:
        self.ended_s = now_s

    def share(self) -> float:
        """How much of the phase is done, 0 to 1; by bytes where they are known, since files differ in size."""
        if self.bytes_total:
            return min(1.0, self.nbytes / self.bytes_total)
        if self.items_total:
            return min(1.0, self.items / self.items_total)
        return 0.0 if self.ended_s is None else 1.0

    def text(self, now_s: float) -> str:
        """`1,200 of 5,000 files, 1.2 GiB of 4.0 GiB, 310 MiB/s, 9 s left`; at the end the time taken."""
        elapsed = max(1e-9, (self.ended_s if self.ended_s is not None else now_s) - self.begun_s)
        parts = []
        if self.items or self.items_total:
            parts.append(_of(f"{self.items:,}", f"{self.items_total:,}" if self.items_total else "") + f" {self.noun}")
        if self.nbytes or self.bytes_total:
            parts.append(_of(bytes_text(self.nbytes), bytes_text(self.bytes_total) if self.bytes_total else ""))
        if self.nbytes:
            parts.append(f"{bytes_text(self.nbytes / elapsed)}/s")
        elif self.items:
            parts.append(f"{self.items / elapsed:,.0f} {self.noun}/s")
        if self.ended_s is not None:
            return ", ".join([*parts, f"in {duration_text(elapsed)}"]) if parts else duration_text(elapsed)
        left = seconds_left(self.share(), elapsed)
        return ", ".join(parts if left is None else [*parts, f"{duration_text(left)} left"])


def seconds_left(share: float, elapsed_s: float) -> float | None:
    """Time the rest takes at the pace so far; None while nothing is known."""
    return None if share <= 0.0 else elapsed_s * (1.0 - share) / share


def duration_text(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def _of(part: str, whole: str) -> str:
    return f"{part} of {whole}" if whole and whole != part else part
