"""What a run needs, put together: GPU and host memory of each phase, disk, time, and whether it fits a machine. Pure.

Nothing here is measured: bytes are of traced steps and of arithmetic on sizes, seconds are modelled from the figures of
a machine's table. What is not known is None, and every total that lacks a part says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from supertuner.core.types import bytes_text
from supertuner.memory.machines import MachineSpec
from supertuner.plan.forecast.storage import StorageItem, total_storage
from supertuner.plan.placement.plan import MemoryPlan, PlanEstimate

TIGHT_SHARE = 0.95
"""Of GPU memory; `memory.overflow` leaves the same 5 % free. What a driver and its context take is not forecast."""
HOST_SHARE = 0.9
"""Of host memory, for a plan and what the run stores; `memory.overflow` leaves the same 10 % to others."""


class FitStatus(StrEnum):
    FITS = "fits"
    TIGHT = "fits tightly"
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class MachineCapacity:
    """What a machine has for a run."""

    machine: MachineSpec
    title: str
    gpu_bytes: int | None
    """None: it has no GPU, or nobody knows."""
    host_bytes: int | None
    """On a one-pool machine this is the same memory again."""
    source: str
    """Where the two come from."""
    has_overflow: bool = False
    """What finds no room on the GPU goes on in host memory (`memory.overflow`)."""

    @property
    def one_pool(self) -> bool:
        return self.machine.one_pool

    @property
    def on_cpu(self) -> bool:
        """There is no GPU: everything is in host memory."""
        return self.machine.key == "cpu"


@dataclass(frozen=True, slots=True)
class PhaseForecast:
    """A part of the run with a peak of its own."""

    name: str
    gpu: Mapping[str, int]
    """At the fullest moment, by class."""
    reserved_bytes: int | None
    """What torch's allocator takes from the driver for it; None: not forecast."""
    host: Mapping[str, int] = field(default_factory=dict)
    """In host memory, beside what the run stores there."""
    seconds: float | None = None
    """Of the whole run; None: not known."""
    notes: tuple[str, ...] = ()
    """What the figures leave out."""
    certain: bool = True
    """False: full of convolutions, whose workspaces nobody knows without the GPU."""
    plan: MemoryPlan | None = None
    """The plan that the run follows in it; None: it has everything on the GPU."""

    @property
    def plan_estimate(self) -> PlanEstimate | None:
        """What the plan makes of it, if one is followed."""
        return None if self.plan is None or not self.plan.fits else self.plan.modelled

    @property
    def all_on_gpu_bytes(self) -> int:
        """With everything on the GPU: what the allocator takes, where that is forecast."""
        return max(sum(self.gpu.values()), self.reserved_bytes or 0)

    @property
    def gpu_bytes(self) -> int:
        """What must be there: by the plan, if one is followed."""
        return self.all_on_gpu_bytes if self.plan_estimate is None else self.plan_estimate.gpu_peak_bytes

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values()) + (0 if self.plan_estimate is None else self.plan_estimate.host_peak_bytes)


@dataclass(frozen=True, slots=True)
class FitVerdict:
    """A phase against a machine."""

    phase: str
    fit: FitStatus
    need_bytes: int
    have_bytes: int | None
    where: str
    """`GPU memory`, `host memory`, `the pool`."""

    @property
    def spare_bytes(self) -> int | None:
        """Below zero: so much is missing."""
        return None if self.have_bytes is None else self.have_bytes - self.need_bytes


@dataclass(frozen=True, slots=True)
class TimingScenario:
    """What everything takes if kernels reach a share of the machine's published rates."""

    compute_share: float
    step_s: float
    """Of the largest window, as the run will place things."""
    bound_s: float
    """No placement takes less."""
    bounded_by: str
    training_s: float | None
    """Of the whole run; None: its length is not known."""
    encoding_s: float | None
    sampling_s: float | None

    @property
    def total_s(self) -> float | None:
        if self.training_s is None:
            return None
        return self.training_s + (self.encoding_s or 0.0) + (self.sampling_s or 0.0)


@dataclass(frozen=True, slots=True)
class RunTiming:
    """What steps and the run take, modelled."""

    paces: tuple[TimingScenario, ...]
    """The first is at the rates as published: the least that it can take."""
    window: int
    """Samples of the largest window."""
    micro_batches: int
    """In it, of one process."""
    first_window: int
    """Samples of the first window, where a ramp begins."""
    steps: int | None
    """Of the run; None: its length is not known."""
    samples: int | None
    left_out: tuple[str, ...] = ()
    """What takes time and is not in it."""


@dataclass(frozen=True, slots=True)
class SuggestedChange:
    """One change of the settings, or another machine, and what it would do."""

    what: str
    """As it is written: `train.gradient_checkpointing=true`."""
    gpu_bytes: int | None
    """The fullest phase's peak; None: not known."""
    host_bytes: int
    fits: bool
    time: float | None
    """Of a sample, against the settings as they are: 1.33 is a third more; None: not known."""
    price: str
    """What it costs, in words."""
    exact: bool = True
    """False: scaled from the trace of the settings as they are."""
    same_result: bool = True
    """What is learnt stays the same: only time and memory change."""


@dataclass(frozen=True, slots=True)
class RunForecast:
    model: str
    settings: str
    """What is trained and how, in a line."""
    capacity: MachineCapacity
    phases: tuple[PhaseForecast, ...]
    stored: tuple[StorageItem, ...]
    timing: RunTiming | None
    why_no_timing: str = ""
    changes: tuple[SuggestedChange, ...] = ()
    plans: Mapping[str, MemoryPlan] = field(default_factory=dict)
    """By phase: where things would live by a plan, whether the run follows it or not."""
    notes: tuple[str, ...] = ()

    @property
    def fullest_phase(self) -> PhaseForecast | None:
        """The phase that would need the most with everything on the GPU."""
        return max(self.phases, key=lambda phase: phase.all_on_gpu_bytes, default=None)

    @property
    def stored_host_bytes(self) -> int:
        """Host memory that staged files, caches and batches take, as far as it is known."""
        return total_storage(self.stored, "memory")[0]

    @property
    def verdict(self) -> FitVerdict:
        """The worst of all phases: what does not fit before what fits tightly, and of these the fullest."""
        verdicts = [
            verdict for phase in self.phases for verdict in judge_phase(phase, self.capacity, self.stored_host_bytes)
        ]
        return max(verdicts, key=_severity, default=FitVerdict("", FitStatus.UNKNOWN, 0, None, "GPU memory"))


def judge_phase(phase: PhaseForecast, capacity: MachineCapacity, stored_bytes: int) -> list[FitVerdict]:
    """A phase in each memory that it needs."""
    total_bytes = phase.gpu_bytes + phase.host_bytes + stored_bytes
    if capacity.on_cpu:
        return [_fit_verdict(phase, total_bytes, capacity.host_bytes, "host memory")]
    if capacity.one_pool:
        return [_fit_verdict(phase, total_bytes, capacity.gpu_bytes, "the pool")]
    overflow_bytes = 0
    if capacity.has_overflow and capacity.gpu_bytes is not None:
        overflow_bytes = max(0, phase.gpu_bytes - int(TIGHT_SHARE * capacity.gpu_bytes))
    return [
        _fit_verdict(phase, phase.gpu_bytes - overflow_bytes, capacity.gpu_bytes, "GPU memory"),
        _fit_verdict(phase, phase.host_bytes + stored_bytes + overflow_bytes, capacity.host_bytes, "host memory"),
    ]


def _fit_verdict(phase: PhaseForecast, need: int, have: int | None, where: str) -> FitVerdict:
    if have is None:
        return FitVerdict(phase.name, FitStatus.UNKNOWN, need, have, where)
    fit = FitStatus.DOES_NOT_FIT if need > have else FitStatus.TIGHT if need > TIGHT_SHARE * have else FitStatus.FITS
    return FitVerdict(phase.name, fit, need, have, where)


def _severity(verdict: FitVerdict) -> tuple[int, float]:
    """What is missing counts most; a host whose memory nobody knows (a card fits many) counts least."""
    rank = {FitStatus.FITS: 1, FitStatus.TIGHT: 2, FitStatus.DOES_NOT_FIT: 3}.get(
        verdict.fit, 2 if verdict.where != "host memory" else 0
    )
    return rank, verdict.need_bytes / max(1, verdict.have_bytes or 1)


def capacity_text(capacity: MachineCapacity) -> str:
    """`GH200 96 GB: 96.0 GiB of GPU memory, 480 GiB of host memory`."""
    if capacity.one_pool and capacity.gpu_bytes is not None:
        return f"{capacity.title}: one pool of {bytes_text(capacity.gpu_bytes)}"
    gpu = "" if capacity.gpu_bytes is None else f"{bytes_text(capacity.gpu_bytes)} of GPU memory"
    host = (
        "host memory not known" if capacity.host_bytes is None else f"{bytes_text(capacity.host_bytes)} of host memory"
    )
    return f"{capacity.title}: {', '.join(filter(None, (gpu, host)))}"
