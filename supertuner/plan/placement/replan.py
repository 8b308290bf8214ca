"""Whether a plan still holds, decided from counters at a window boundary: keep it, fetch further ahead, or plan anew.
Pure: counters in, advice with its reason out.

What a plan rests on is the speed of the link each way and that copies hide behind the computation. Those are compared;
and the time of a sample with what it was when the plan was new, which notices everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from supertuner.plan.placement.throughput import MachineRates
from supertuner.train.offload.transfer import TransferCounters

DRIFT_THRESHOLD = 0.10
"""Beyond it a plan is made anew."""
WAITING_THRESHOLD = 0.02
"""Of a window's time: a computation that waits for copies longer than this may gain from fetching further ahead."""
IMPROVEMENT_RATIO = 0.9
"""Fetching further ahead has helped if the wait fell at least to this share of what it was."""
MIN_COPY_S = 1e-3
"""Copies that took less together say nothing about the link."""


@dataclass(frozen=True, slots=True)
class PlanObservation:
    """Some windows of one expert under one plan."""

    windows: int
    samples: int
    seconds: float
    counters: TransferCounters

    @property
    def to_device_bytes_s(self) -> float | None:
        return _bytes_per_second(self.counters.fetched_bytes, self.counters.fetch_s)

    @property
    def to_host_bytes_s(self) -> float | None:
        return _bytes_per_second(self.counters.sent_bytes, self.counters.send_s)

    @property
    def waiting_share(self) -> float:
        """Share of the time in which the computation waited for copies."""
        return self.counters.waited_s / self.seconds if self.seconds > 0 else 0.0

    @property
    def sample_s(self) -> float:
        return self.seconds / max(1, self.samples)


@dataclass(frozen=True, slots=True)
class PlanAssumptions:
    """What a plan rests on. None: not known, and then not compared."""

    to_device_bytes_s: float | None = None
    to_host_bytes_s: float | None = None
    waiting_share: float | None = None
    """Share of the step in which the model has the computation wait."""
    peak_sample_s: float | None = None
    """What computing a sample under this plan would take at the machine's peak."""
    sample_s: float | None = None
    """As it was observed when the plan was new."""

    def with_sample_time(self, observation: PlanObservation) -> PlanAssumptions:
        return self if self.sample_s is not None else replace(self, sample_s=observation.sample_s)


def describe_drift(assumptions: PlanAssumptions, observation: PlanObservation) -> str | None:
    """Why the plan no longer rests on what is the case; None: it does."""
    for name, assumed, observed in (
        ("the link to the GPU", assumptions.to_device_bytes_s, observation.to_device_bytes_s),
        ("the link to the host", assumptions.to_host_bytes_s, observation.to_host_bytes_s),
    ):
        if assumed is not None and observed is not None and abs(observed / assumed - 1) > DRIFT_THRESHOLD:
            return f"{name} moves {observed / 1e9:.3g} GB/s, and the plan rests on {assumed / 1e9:.3g}"
    if (
        assumptions.waiting_share is not None
        and observation.waiting_share - assumptions.waiting_share > DRIFT_THRESHOLD
    ):
        return f"the GPU waits for copies {observation.waiting_share:.0%} of the time, and {assumptions.waiting_share:.0%} was planned"
    if assumptions.sample_s is not None and abs(observation.sample_s / assumptions.sample_s - 1) > DRIFT_THRESHOLD:
        return f"a sample takes {observation.sample_s:.3g} s, and took {assumptions.sample_s:.3g} when the plan was new"
    return None


def observed_rates(rates: MachineRates, assumptions: PlanAssumptions, observation: PlanObservation) -> MachineRates:
    """The rates to plan with from now on: what was observed, and the machine's figures for the rest.

    The share of the peak that kernels reach is that of samples of the planned shape; where many are smaller it comes
    out too high, as it was before anything was observed.
    """
    compute_s = observation.seconds - observation.counters.waited_s
    share = rates.compute_share
    if assumptions.peak_sample_s is not None and compute_s > 0:
        share = min(1.0, assumptions.peak_sample_s * observation.samples / compute_s)
    return replace(
        rates,
        compute_share=share,
        to_device_bytes_s=observation.to_device_bytes_s or rates.to_device_bytes_s,
        to_host_bytes_s=observation.to_host_bytes_s or rates.to_host_bytes_s,
    )


@dataclass(frozen=True, slots=True)
class PrefetchDistance:
    """How far ahead blocks are fetched, following the waits."""

    ahead: int
    max_ahead: int
    """What memory and the number of blocks allow."""
    previous_waiting: float | None = None
    """Share of waiting at one block less, if that was tried just now."""
    settled: bool = False
    """More did not help: the link itself is too slow, and that is for a new plan to answer."""

    def adjusted(self, observation: PlanObservation) -> tuple[PrefetchDistance, str | None]:
        """The distance for the next windows, and why if it is another."""
        if self.previous_waiting is not None and observation.waiting_share > IMPROVEMENT_RATIO * self.previous_waiting:
            one_less = replace(self, ahead=self.ahead - 1, previous_waiting=None, settled=True)
            return (
                one_less,
                f"{self.ahead} blocks ahead did not help: the GPU waits {observation.waiting_share:.1%} of the time",
            )
        if observation.waiting_share > WAITING_THRESHOLD and self.ahead < self.max_ahead and not self.settled:
            one_more = replace(self, ahead=self.ahead + 1, previous_waiting=observation.waiting_share)
            return one_more, f"the GPU waits for copies {observation.waiting_share:.1%} of the time"
        return replace(self, previous_waiting=None), None


def _bytes_per_second(nbytes: int, seconds: float) -> float | None:
    return nbytes / seconds if nbytes and seconds > MIN_COPY_S else None
