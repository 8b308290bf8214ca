"""The forecast of a run as data: memory of each phase, disk, time, and whether it fits a machine. Pure.

Nothing here is measured: bytes come from traced steps and from arithmetic on sizes, seconds are modelled from the
figures of a table of machines. An unknown value is None, and a total that lacks a part says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from supertuner.core.types import JSON, bytes_text
from supertuner.memory.machines import ONE_POOL_SHARE, MachineSpec
from supertuner.plan.forecast.storage import StorageItem, total_storage
from supertuner.plan.placement.plan import MemoryPlan, PlanEstimate
from supertuner.sinks.phase_counters import duration_text

TIGHT_SHARE = 0.95
"""Share of GPU memory that a run fits into comfortably; `memory.overflow` leaves the same 5 % free. The forecast does
not include what the driver and its context take."""
HOST_SHARE = 0.9
"""Share of host memory for a plan and for what the run stores; `memory.overflow` leaves the same 10 % to others."""

ASSUMED_COMPUTE_SHARE = 0.4
"""Share of the published peak rates for a second column of times: 400 of a GH200's 990 TFLOPS. An assumption, not a
measurement; `--compute-share` sets another."""
ENCODERS = "encoders"
"""A key of `PhaseForecast.gpu`: encoders that stay on the GPU during training. Plans leave room for them."""
THE_POOL = "the pool"
"""`FitVerdict.where` on a one-pool machine."""


@dataclass(frozen=True, slots=True)
class EstimateOptions:
    """What an estimate assumes and includes."""

    samples: int | None = None
    """Samples of each dataset that is not on this machine; None: unknown."""
    compute_share: float | None = None
    """Share of the peak rates for the second column of times; None: `ASSUMED_COMPUTE_SHARE`."""
    advise: bool = True
    """Also evaluate single changes of the settings."""


class FitStatus(StrEnum):
    FITS = "fits"
    TIGHT = "fits tightly"
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class MachineCapacity:
    """The memory that a machine has for a run."""

    machine: MachineSpec
    title: str
    gpu_bytes: int | None
    """None: the machine has no GPU, or its size is unknown."""
    host_bytes: int | None
    """On a one-pool machine this is the same memory as `gpu_bytes`."""
    source: str
    """Where the two sizes come from."""
    has_overflow: bool = False
    """True: allocations that do not fit on the GPU continue in host memory (`memory.overflow`)."""

    @property
    def one_pool(self) -> bool:
        return self.machine.one_pool

    @property
    def gpu_limit_bytes(self) -> int | None:
        """What a run may take of `gpu_bytes`: all of it, or `ONE_POOL_SHARE` of a pool that the host lives in, too."""
        return None if self.gpu_bytes is None else int(self.gpu_bytes * (ONE_POOL_SHARE if self.one_pool else 1.0))

    @property
    def on_cpu(self) -> bool:
        """True: there is no GPU, and everything is in host memory."""
        return self.machine.key == "cpu"


@dataclass(frozen=True, slots=True)
class PhaseForecast:
    """One phase of the run (encoding, training an expert, sampling) at its peak."""

    name: str
    gpu: Mapping[str, int]
    """Bytes by class of tensor at the peak, with everything on the GPU."""
    reserved_bytes: int | None
    """What torch's caching allocator reserves from the driver for it; None: not forecast."""
    host: Mapping[str, int] = field(default_factory=dict)
    """Host memory beside what the run stores there."""
    seconds: float | None = None
    """Time of the phase over the whole run; None: unknown."""
    notes: tuple[str, ...] = ()
    """What the figures leave out."""
    certain: bool = True
    """False: the phase runs many convolutions, whose cuDNN workspaces are unknown without the GPU."""
    plan: MemoryPlan | None = None
    """The plan that the run follows in this phase; None: everything is on the GPU."""

    @property
    def plan_estimate(self) -> PlanEstimate | None:
        """The modelled figures of the plan that is followed; None: no plan is followed."""
        return None if self.plan is None or not self.plan.fits else self.plan.modelled

    @property
    def all_on_gpu_bytes(self) -> int:
        """The peak with everything on the GPU: what the allocator reserves, where that is forecast."""
        return max(sum(self.gpu.values()), self.reserved_bytes or 0)

    @property
    def gpu_bytes(self) -> int:
        """The peak of GPU memory that is compared with the machine's: what the caching allocator reserves, under the
        plan if one is followed."""
        return self.all_on_gpu_bytes if self.plan_estimate is None else self._beside_plan(self.plan_estimate.gpu_bytes)

    @property
    def allocated_bytes(self) -> int:
        """The peak of the bytes that live tensors occupy, under the plan if one is followed."""
        if self.plan_estimate is None:
            return sum(self.gpu.values())
        return self._beside_plan(self.plan_estimate.gpu_peak_bytes)

    def _beside_plan(self, planned_bytes: int) -> int:
        return planned_bytes + self.gpu.get(ENCODERS, 0)

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values()) + (0 if self.plan_estimate is None else self.plan_estimate.host_peak_bytes)


@dataclass(frozen=True, slots=True)
class FitVerdict:
    """Whether one phase fits into one memory of a machine."""

    phase: str
    fit: FitStatus
    need_bytes: int
    have_bytes: int | None
    where: str
    """`GPU memory`, `host memory`, `the pool`."""

    @property
    def spare_bytes(self) -> int | None:
        """Bytes that stay free; negative: bytes that are missing; None: the size of the memory is unknown."""
        return None if self.have_bytes is None else self.have_bytes - self.need_bytes


@dataclass(frozen=True, slots=True)
class TimingScenario:
    """Modelled times if kernels reach `compute_share` of the machine's published rates."""

    compute_share: float
    step_s: float
    """One optimizer step with the largest window, under the plan that the run follows."""
    bound_s: float
    """Lower bound: no placement takes less."""
    bounded_by: str
    training_s: float | None
    """The whole run; None: its length is unknown."""
    encoding_s: float | None
    sampling_s: float | None

    @property
    def total_s(self) -> float | None:
        if self.training_s is None:
            return None
        return self.training_s + (self.encoding_s or 0.0) + (self.sampling_s or 0.0)


@dataclass(frozen=True, slots=True)
class RunTiming:
    """Modelled times of a step and of the run."""

    paces: tuple[TimingScenario, ...]
    """The first is at the published rates: a lower limit of the time."""
    window: int
    """Samples of the largest window."""
    micro_batches: int
    """Micro-batches of the largest window, per process."""
    first_window: int
    """Samples of the first window, where a ramp begins."""
    steps: int | None
    """Optimizer steps of the run; None: unknown."""
    samples: int | None
    left_out: tuple[str, ...] = ()
    """What takes time and is not included."""


@dataclass(frozen=True, slots=True)
class SuggestedChange:
    """One change of a setting, or another machine, and its effect."""

    what: str
    """As the user writes it: `train.gradient_checkpointing=true`."""
    gpu_bytes: int | None
    """Peak of the fullest phase after the change; None: unknown."""
    host_bytes: int
    fits: bool
    time: float | None
    """Time per sample relative to the current settings: 1.33 is a third more; None: unknown."""
    price: str
    """What the change costs, for people."""
    exact: bool = True
    """False: scaled from the trace of the current settings."""
    same_result: bool = True
    """True: training computes the same; only time and memory change."""


@dataclass(frozen=True, slots=True)
class RunForecast:
    """What a run needs on a machine, phase by phase, and how long it takes. Everything is modelled."""

    model: str
    settings: str
    """What is trained and how, in one line."""
    capacity: MachineCapacity
    phases: tuple[PhaseForecast, ...]
    stored: tuple[StorageItem, ...]
    timing: RunTiming | None
    why_no_timing: str = ""
    changes: tuple[SuggestedChange, ...] = ()
    plans: Mapping[str, MemoryPlan] = field(default_factory=dict)
    """By phase: the best plan, whether the run follows it or not."""
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether every phase fits; None: the size of a memory is unknown."""
        return {FitStatus.UNKNOWN: None, FitStatus.DOES_NOT_FIT: False}.get(self.verdict.fit, True)

    @property
    def peak_bytes(self) -> int:
        """Peak of GPU memory over all phases, under the plans that the run follows."""
        return max((phase.gpu_bytes for phase in self.phases), default=0)

    @property
    def step_seconds(self) -> float | None:
        """One optimizer step with the largest window at the published rates; None: a rate is unknown."""
        return None if self.timing is None else self.timing.paces[0].step_s

    @property
    def fullest_phase(self) -> PhaseForecast | None:
        """The phase with the highest peak if everything were on the GPU."""
        return max(self.phases, key=lambda phase: phase.all_on_gpu_bytes, default=None)

    @property
    def verdict(self) -> FitVerdict:
        """The worst verdict over all phases: `does not fit` before `fits tightly`; among equals the fullest."""
        stored = total_storage(self.stored, "memory")[0]
        verdicts = [verdict for phase in self.phases for verdict in judge_phase(phase, self.capacity, stored)]
        return max(verdicts, key=_severity, default=FitVerdict("", FitStatus.UNKNOWN, 0, None, "GPU memory"))

    def to_dict(self) -> dict[str, JSON]:
        """Everything as JSON values, in bytes and seconds. None: unknown."""
        verdict, capacity, timing = self.verdict, self.capacity, self.timing
        sizes = {"gpu_bytes": capacity.gpu_bytes, "host_bytes": capacity.host_bytes, "one_pool": capacity.one_pool}
        sizes["gpu_limit_bytes"] = capacity.gpu_limit_bytes
        return {
            "modelled": True,
            "verdict": verdict_text(self),
            "fits": self.fits,
            "judged": {**asdict(verdict), "spare_bytes": verdict.spare_bytes},
            "model": self.model,
            "settings": self.settings,
            "machine": {"key": capacity.machine.key, "title": capacity.title, **sizes, "source": capacity.source},
            "phases": [_phase_values(one) for one in self.phases],
            "stored": [asdict(one) for one in self.stored],
            "timing": None if timing is None else asdict(timing),
            "total_s": None if timing is None else timing.paces[0].total_s,
            "why_no_timing": self.why_no_timing,
            "plans": {phase: plan.to_dict() for phase, plan in self.plans.items()},
            "changes": [asdict(one) for one in self.changes],
            "notes": list(self.notes),
        }


def _phase_values(phase: PhaseForecast) -> dict[str, JSON]:
    """`gpu_peak_bytes` is compared with the machine's memory; `allocated` and `reserved` are the two counts of torch's
    allocator, of which it is the larger."""
    gpu = {"allocated": phase.allocated_bytes, "reserved": None if phase.reserved_bytes is None else phase.gpu_bytes}
    return {**asdict(phase), "gpu_peak_bytes": phase.gpu_bytes, "gpu_peak": gpu}


def judge_phase(phase: PhaseForecast, capacity: MachineCapacity, stored_bytes: int) -> list[FitVerdict]:
    """One verdict for each memory that the phase uses."""
    total_bytes = phase.gpu_bytes + phase.host_bytes + stored_bytes
    if capacity.on_cpu:
        return [_fit_verdict(phase, total_bytes, capacity.host_bytes, "host memory")]
    if capacity.one_pool:
        return [_fit_verdict(phase, total_bytes, capacity.gpu_limit_bytes, THE_POOL)]
    overflow_bytes = 0
    if capacity.has_overflow and capacity.gpu_bytes is not None:
        overflow_bytes = max(0, phase.gpu_bytes - int(TIGHT_SHARE * capacity.gpu_bytes))
    return [
        _fit_verdict(phase, phase.gpu_bytes - overflow_bytes, capacity.gpu_bytes, "GPU memory"),
        _fit_verdict(phase, phase.host_bytes + stored_bytes + overflow_bytes, capacity.host_bytes, "host memory"),
    ]


def _fit_verdict(phase: PhaseForecast, need: int, have: int | None, where: str) -> FitVerdict:
    if have is None:
        fit = FitStatus.UNKNOWN
    elif need > have:
        fit = FitStatus.DOES_NOT_FIT
    else:
        fit = FitStatus.TIGHT if need > TIGHT_SHARE * have else FitStatus.FITS
    return FitVerdict(phase.name, fit, need, have, where)


def _severity(verdict: FitVerdict) -> tuple[int, float]:
    """A missing byte counts most. Host memory of unknown size counts least: a graphics card fits many hosts."""
    unknown = 0 if verdict.where == "host memory" else 2
    ranks = {FitStatus.FITS: 1, FitStatus.TIGHT: 2, FitStatus.DOES_NOT_FIT: 3, FitStatus.UNKNOWN: unknown}
    return ranks[verdict.fit], verdict.need_bytes / max(1, verdict.have_bytes or 1)


# ── one line ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def verdict_text(forecast: RunForecast) -> str:
    """One line: whether the run fits, how much memory its worst phase leaves free or lacks, and, if it fits and the
    rates are known, the least time that a step and the run take."""
    verdict = forecast.verdict
    planned = any(phase.name == verdict.phase and phase.plan_estimate is not None for phase in forecast.phases)
    fit = _fit_text(verdict, forecast.capacity.title, planned)
    if forecast.timing is None or verdict.fit is FitStatus.DOES_NOT_FIT:
        return fit
    at_peak_rates = forecast.timing.paces[0]
    total = "" if at_peak_rates.total_s is None else f", the run at least {run_duration_text(at_peak_rates.total_s)}"
    return f"{fit}; a step takes at least {step_duration_text(at_peak_rates.step_s)}{total}"


def _fit_text(verdict: FitVerdict, machine: str, planned: bool) -> str:
    need, have = bytes_text(verdict.need_bytes), verdict.have_bytes
    need_text = f"{verdict.phase} {'takes by its plan' if planned else 'needs'} {need}"
    if have is None or verdict.spare_bytes is None:
        return f"modelled: {need_text} of {verdict.where}, and how much {machine} has is not known"
    have_text = f"of {bytes_text(have)} {verdict.where}"
    if verdict.where == THE_POOL:
        have_text = f"of the {bytes_text(have)} of the pool that a run may take"
    if verdict.fit is FitStatus.DOES_NOT_FIT:
        return f"modelled: does not fit {machine}: {need_text} {have_text}, {bytes_text(-verdict.spare_bytes)} too much"
    spare_text = f"{bytes_text(verdict.spare_bytes)} to spare"
    if verdict.fit is FitStatus.TIGHT:
        return f"modelled: fits {machine} tightly: {need_text} {have_text}, {spare_text}, before what the driver takes"
    return f"modelled: fits {machine}: {need_text} {have_text}, {spare_text}"


def step_duration_text(seconds: float) -> str:
    """`8.1 ms`, `0.4 s`, `3 min 20 s`, `2 h 05 min`."""
    return f"{seconds * 1000:.2g} ms" if seconds < 0.1 else duration_text(seconds)


def run_duration_text(seconds: float) -> str:
    """The time of a run in hours, the unit in which machines are rented; below an hour as `step_duration_text`."""
    return step_duration_text(seconds) if seconds < 3600 else f"{seconds / 3600:,.1f} h"


def capacity_text(capacity: MachineCapacity) -> str:
    """`GH200 96 GB: 96.0 GiB of GPU memory, 480 GiB of host memory`."""
    if capacity.one_pool and capacity.gpu_bytes is not None:
        limit = bytes_text(capacity.gpu_limit_bytes or 0)
        return f"{capacity.title}: one pool of {bytes_text(capacity.gpu_bytes)}, of which a run may take {limit}"
    gpu = "" if capacity.gpu_bytes is None else f"{bytes_text(capacity.gpu_bytes)} of GPU memory, "
    host = capacity.host_bytes
    host_text = "host memory not known" if host is None else f"{bytes_text(host)} of host memory"
    return f"{capacity.title}: {gpu}{host_text}"
