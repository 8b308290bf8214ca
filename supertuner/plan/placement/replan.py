"""Decides at a window boundary, from counters, whether a plan still holds: keep it, prefetch further ahead, or re-plan.
Pure: counters in, a decision with its reason out.

A plan assumes a bandwidth for each direction of the link, and that copies hide behind the computation. Both assumptions
are compared with the counters. The time per sample is compared with its value under the new plan, which reveals every
other change of the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from supertuner.plan.placement.throughput import MachineRates

DRIFT_THRESHOLD = 0.10
"""Relative difference from an assumption above which the plan is made again."""
WAITING_THRESHOLD = 0.02
"""Share of a window's time: if the computation waits longer for copies, prefetching further ahead may help."""
IMPROVEMENT_RATIO = 0.9
"""Prefetching further ahead helped if it reduced the wait at least to this share of the previous wait."""
MIN_COPY_S = 1e-3
"""Copies that took less than this in total say nothing about the bandwidth of the link."""


@dataclass(slots=True)
class TransferCounters:
    """Bytes moved between GPU and host memory since the counters were last read, and the time that took.

    The seconds come from the transfer that counts: measured on a GPU, modelled in the emulator.
    """

    fetched_bytes: int = 0
    sent_bytes: int = 0
    fetch_s: float = 0.0
    """Time in which copies to the device were running."""
    send_s: float = 0.0
    """Time in which copies to the host were running."""
    waited_s: float = 0.0
    """Time in which the computation waited for a copy."""
    fetches: int = 0
    """Blocks that were fetched."""
    late: int = 0
    """Blocks whose fetch was requested only when they were needed."""


@dataclass(frozen=True, slots=True)
class PlanObservation:
    """What the counters showed over several windows of one expert under one plan."""

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
    """The figures that a plan was made from. None: the figure is unknown and is not compared."""

    to_device_bytes_s: float | None = None
    to_host_bytes_s: float | None = None
    waiting_share: float | None = None
    """Modelled share of the step in which the computation waits for copies."""
    peak_sample_s: float | None = None
    """Modelled time to compute one sample under this plan at the machine's peak rates."""
    sample_s: float | None = None
    """Measured time per sample when the plan was new."""

    def with_sample_time(self, observation: PlanObservation) -> PlanAssumptions:
        """These assumptions with the observed time per sample, unless one was recorded before."""
        return self if self.sample_s is not None else replace(self, sample_s=observation.sample_s)


def describe_drift(assumptions: PlanAssumptions, observation: PlanObservation) -> str | None:
    """Why the plan's assumptions no longer hold; None: they hold."""
    for name, assumed, observed in (
        ("the link to the GPU", assumptions.to_device_bytes_s, observation.to_device_bytes_s),
        ("the link to the host", assumptions.to_host_bytes_s, observation.to_host_bytes_s),
    ):
        if assumed is not None and observed is not None and abs(observed / assumed - 1) > DRIFT_THRESHOLD:
            return f"{name} moves {observed / 1e9:.3g} GB/s; the plan assumes {assumed / 1e9:.3g} GB/s"
    assumed, waiting = assumptions.waiting_share, observation.waiting_share
    if assumed is not None and waiting - assumed > DRIFT_THRESHOLD:
        return f"the GPU waits for copies {waiting:.0%} of the time; the plan assumes {assumed:.0%}"
    assumed, sample_s = assumptions.sample_s, observation.sample_s
    if assumed is not None and abs(sample_s / assumed - 1) > DRIFT_THRESHOLD:
        return f"a sample takes {sample_s:.3g} s; it took {assumed:.3g} s when the plan was new"
    return None


def observed_rates(rates: MachineRates, assumptions: PlanAssumptions, observation: PlanObservation) -> MachineRates:
    """The rates for the next plan: observed ones where there are any, the machine's figures for the rest.

    `compute_share` is derived as if all samples had the planned shape. If many samples are smaller, it comes out too
    high, but never above 1, the value before anything was observed.
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
    """How many blocks ahead of their use blocks are fetched. Adjusted from the observed waits, one block at a time."""

    ahead: int
    max_ahead: int
    """The most that memory and the number of blocks allow."""
    previous_waiting: float | None = None
    """Waiting share at one block less, if the distance has just been increased by one."""
    settled: bool = False
    """True: a larger distance did not help. The link itself is too slow, which only a new plan can change."""

    def adjusted(self, observation: PlanObservation) -> tuple[PrefetchDistance, str | None]:
        """The distance for the next windows, and the reason if it changes."""
        waiting = observation.waiting_share
        if self.previous_waiting is not None and waiting > IMPROVEMENT_RATIO * self.previous_waiting:
            one_less = replace(self, ahead=self.ahead - 1, previous_waiting=None, settled=True)
            return one_less, f"{self.ahead} blocks ahead did not help: the GPU waits {waiting:.1%} of the time"
        if waiting > WAITING_THRESHOLD and self.ahead < self.max_ahead and not self.settled:
            one_more = replace(self, ahead=self.ahead + 1, previous_waiting=waiting)
            return one_more, f"the GPU waits for copies {waiting:.1%} of the time"
        return replace(self, previous_waiting=None), None


def _bytes_per_second(nbytes: int, seconds: float) -> float | None:
    return nbytes / seconds if nbytes and seconds > MIN_COPY_S else None
