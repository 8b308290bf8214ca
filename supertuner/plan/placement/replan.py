"""Whether a plan still holds, decided from counters at a window boundary: keep it, fetch further ahead, or plan anew.
Pure: counters in, advice with its reason out.

What a plan rests on is the speed of the link each way and that copies hide behind the computation. Those are compared;
and the time of a sample with what it was when the plan was new, which notices everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from supertuner.plan.placement.throughput import Rates
from supertuner.train.offload.transfer import Counters

DRIFT = 0.10
"""Beyond it a plan is made anew."""
WAITING = 0.02
"""Of a window's time: a computation that waits for copies longer than this may gain from fetching further ahead."""
HELPED = 0.9
"""Fetching further ahead has helped if the wait fell at least to this share of what it was."""
ENOUGH_S = 1e-3
"""Copies that took less together say nothing about the link."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Some windows of one expert under one plan."""

    windows: int
    samples: int
    seconds: float
    counters: Counters

    @property
    def to_device_bytes_s(self) -> float | None:
        return _rate(self.counters.fetched_bytes, self.counters.fetch_s)

    @property
    def to_host_bytes_s(self) -> float | None:
        return _rate(self.counters.sent_bytes, self.counters.send_s)

    @property
    def waiting(self) -> float:
        """Share of the time in which the computation waited for copies."""
        return self.counters.waited_s / self.seconds if self.seconds > 0 else 0.0

    @property
    def sample_s(self) -> float:
        return self.seconds / max(1, self.samples)


@dataclass(frozen=True, slots=True)
class Basis:
    """What a plan rests on. None: not known, and then not compared."""

    to_device_bytes_s: float | None = None
    to_host_bytes_s: float | None = None
    waiting: float | None = None
    """Share of the step in which the model has the computation wait."""
    peak_sample_s: float | None = None
    """What computing a sample under this plan would take at the machine's peak."""
    sample_s: float | None = None
    """As it was observed when the plan was new."""

    def learnt(self, seen: Observed) -> Basis:
        return self if self.sample_s is not None else replace(self, sample_s=seen.sample_s)


def drift(basis: Basis, seen: Observed) -> str | None:
    """Why the plan no longer rests on what is the case; None: it does."""
    for name, was, now in (
        ("the link to the GPU", basis.to_device_bytes_s, seen.to_device_bytes_s),
        ("the link to the host", basis.to_host_bytes_s, seen.to_host_bytes_s),
    ):
        if was is not None and now is not None and abs(now / was - 1) > DRIFT:
            return f"{name} moves {now / 1e9:.3g} GB/s, and the plan rests on {was / 1e9:.3g}"
    if basis.waiting is not None and seen.waiting - basis.waiting > DRIFT:
        return f"the GPU waits for copies {seen.waiting:.0%} of the time, and {basis.waiting:.0%} was planned"
    if basis.sample_s is not None and abs(seen.sample_s / basis.sample_s - 1) > DRIFT:
        return f"a sample takes {seen.sample_s:.3g} s, and took {basis.sample_s:.3g} when the plan was new"
    return None


def rates_seen(rates: Rates, basis: Basis, seen: Observed) -> Rates:
    """The rates to plan with from now on: what was observed, and the machine's figures for the rest.

    The share of the peak that kernels reach is that of samples of the planned shape; where many are smaller it comes
    out too high, as it was before anything was observed.
    """
    computing = seen.seconds - seen.counters.waited_s
    share = rates.compute_share
    if basis.peak_sample_s is not None and computing > 0:
        share = min(1.0, basis.peak_sample_s * seen.samples / computing)
    return replace(
        rates,
        compute_share=share,
        to_device_bytes_s=seen.to_device_bytes_s or rates.to_device_bytes_s,
        to_host_bytes_s=seen.to_host_bytes_s or rates.to_host_bytes_s,
    )


@dataclass(frozen=True, slots=True)
class Distance:
    """How far ahead blocks are fetched, following the waits."""

    ahead: int
    most: int
    """What memory and the number of blocks allow."""
    before: float | None = None
    """Share of waiting at one block less, if that was tried just now."""
    settled: bool = False
    """More did not help: the link itself is too slow, and that is for a new plan to answer."""

    def after(self, seen: Observed) -> tuple[Distance, str | None]:
        """The distance for the next windows, and why if it is another."""
        if self.before is not None and seen.waiting > HELPED * self.before:
            back = replace(self, ahead=self.ahead - 1, before=None, settled=True)
            return back, f"{self.ahead} blocks ahead did not help: the GPU waits {seen.waiting:.1%} of the time"
        if seen.waiting > WAITING and self.ahead < self.most and not self.settled:
            more = replace(self, ahead=self.ahead + 1, before=seen.waiting)
            return more, f"the GPU waits for copies {seen.waiting:.1%} of the time"
        return replace(self, before=None), None


def _rate(nbytes: int, seconds: float) -> float | None:
    return nbytes / seconds if nbytes and seconds > ENOUGH_S else None
