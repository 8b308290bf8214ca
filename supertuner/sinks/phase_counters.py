"""Computes progress figures: how much is done, how fast, and the time left. Callers pass the time."""

from __future__ import annotations

from dataclasses import dataclass

from supertuner.core.types import bytes_text


@dataclass(slots=True)
class PhaseCounters:
    """The counters of one phase. A total of 0 means unknown, and is not shown."""

    title: str
    items_total: int
    bytes_total: int
    started_s: float
    noun: str = "files"
    items: int = 0
    nbytes: int = 0
    ended_s: float | None = None

    def add(self, items: int, nbytes: int) -> None:
        self.items += items
        self.nbytes += nbytes

    def end(self, now_s: float) -> None:
        self.ended_s = now_s

    def fraction_done(self) -> float:
        """How much of the phase is done, 0 to 1; by bytes if their total is known, because files differ in size."""
        if self.bytes_total:
            return min(1.0, self.nbytes / self.bytes_total)
        if self.items_total:
            return min(1.0, self.items / self.items_total)
        return 0.0 if self.ended_s is None else 1.0

    def status_text(self, now_s: float) -> str:
        """`1,200 of 5,000 files, 1.2 GiB of 4.0 GiB, 310 MiB/s, 9 s left`; at the end, the elapsed time."""
        elapsed = max(1e-9, (self.ended_s if self.ended_s is not None else now_s) - self.started_s)
        parts = []
        if self.items or self.items_total:
            total = f"{self.items_total:,}" if self.items_total else ""
            parts.append(f"{_part_of_total(f'{self.items:,}', total)} {self.noun}")
        if self.nbytes or self.bytes_total:
            total = bytes_text(self.bytes_total) if self.bytes_total else ""
            parts.append(_part_of_total(bytes_text(self.nbytes), total))
        if self.nbytes:
            parts.append(f"{bytes_text(self.nbytes / elapsed)}/s")
        elif self.items:
            parts.append(f"{rate_text(self.items / elapsed)} {self.noun}/s")
        if self.ended_s is not None:
            return ", ".join([*parts, f"in {duration_text(elapsed)}"]) if parts else duration_text(elapsed)
        if (done := self.fraction_done()) > 0.0:  # the time left at the average pace so far
            parts.append(f"{duration_text(elapsed * (1.0 - done) / done)} left")
        return ", ".join(parts)


def rate_text(rate: float) -> str:
    """`1,234`, `12.3`, `0.0421`: three significant digits, so that a slow rate is not shown as 0."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def duration_text(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60:02} s"
    return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60:02} min"


def _part_of_total(part: str, total: str) -> str:
    return f"{part} of {total}" if total and total != part else part
