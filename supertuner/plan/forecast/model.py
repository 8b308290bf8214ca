"""What a run needs, put together: GPU and host memory of each phase, disk, time, and whether it fits a machine. Pure.

Nothing here is measured: bytes are of traced steps and of arithmetic on sizes, seconds are modelled from the figures of
a machine's table. What is not known is None, and every total that lacks a part says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from supertuner.core.types import bytes_text
from supertuner.memory.machines import Machine
from supertuner.plan.forecast.storage import Stored, together
from supertuner.plan.placement.plan import Modelled, Plan

TIGHT_SHARE = 0.95
"""Of GPU memory; `memory.overflow` leaves the same 5 % free. What a driver and its context take is not forecast."""
HOST_SHARE = 0.9
"""Of host memory, for a plan and what the run stores; `memory.overflow` leaves the same 10 % to others."""


class Fit(StrEnum):
    FITS = "fits"
    TIGHT = "fits tightly"
    DOES_NOT = "does not fit"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Room:
    """What a machine has for a run."""

    machine: Machine
    title: str
    gpu_bytes: int | None
    """None: it has no GPU, or nobody knows."""
    host_bytes: int | None
    """On a one-pool machine this is the same memory again."""
    source: str
    """Where the two come from."""
    overflows: bool = False
    """What finds no room on the GPU goes on in host memory (`memory.overflow`)."""

    @property
    def one_pool(self) -> bool:
        return self.machine.one_pool

    @property
    def on_cpu(self) -> bool:
        """There is no GPU: everything is in host memory."""
        return self.machine.key == "cpu"


@dataclass(frozen=True, slots=True)
class Phase:
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
    plan: Plan | None = None
    """The plan that the run follows in it; None: it has everything on the GPU."""

    @property
    def planned(self) -> Modelled | None:
        """What the plan makes of it, if one is followed."""
        return None if self.plan is None or not self.plan.fits else self.plan.modelled

    @property
    def everything_bytes(self) -> int:
        """With everything on the GPU: what the allocator takes, where that is forecast."""
        return max(sum(self.gpu.values()), self.reserved_bytes or 0)

    @property
    def gpu_bytes(self) -> int:
        """What must be there: by the plan, if one is followed."""
        return self.everything_bytes if self.planned is None else self.planned.gpu_peak_bytes

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values()) + (0 if self.planned is None else self.planned.host_peak_bytes)


@dataclass(frozen=True, slots=True)
class Judged:
    """A phase against a machine."""

    phase: str
    fit: Fit
    need_bytes: int
    have_bytes: int | None
    where: str
    """`GPU memory`, `host memory`, `the pool`."""

    @property
    def spare_bytes(self) -> int | None:
        """Below zero: so much is missing."""
        return None if self.have_bytes is None else self.have_bytes - self.need_bytes


@dataclass(frozen=True, slots=True)
class Pace:
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
class Timing:
    """What steps and the run take, modelled."""

    paces: tuple[Pace, ...]
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
class Change:
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
class Forecast:
    model: str
    settings: str
    """What is trained and how, in a line."""
    room: Room
    phases: tuple[Phase, ...]
    stored: tuple[Stored, ...]
    timing: Timing | None
    why_no_timing: str = ""
    changes: tuple[Change, ...] = ()
    plans: Mapping[str, Plan] = field(default_factory=dict)
    """By phase: where things would live by a plan, whether the run follows it or not."""
    notes: tuple[str, ...] = ()

    @property
    def fullest(self) -> Phase | None:
        """The phase that would need the most with everything on the GPU."""
        return max(self.phases, key=lambda phase: phase.everything_bytes, default=None)

    @property
    def stored_bytes(self) -> int:
        """Host memory that staged files, caches and batches take, as far as it is known."""
        return together(self.stored, "memory")[0]

    @property
    def judged(self) -> Judged:
        """The worst of all phases: what does not fit before what fits tightly, and of these the fullest."""
        found = [verdict for phase in self.phases for verdict in judge(phase, self.room, self.stored_bytes)]
        return max(found, key=_worse, default=Judged("", Fit.UNKNOWN, 0, None, "GPU memory"))


def judge(phase: Phase, room: Room, stored_bytes: int) -> list[Judged]:
    """A phase in each memory that it needs."""
    together = phase.gpu_bytes + phase.host_bytes + stored_bytes
    if room.on_cpu:
        return [_judged(phase, together, room.host_bytes, "host memory")]
    if room.one_pool:
        return [_judged(phase, together, room.gpu_bytes, "the pool")]
    over = 0
    if room.overflows and room.gpu_bytes is not None:
        over = max(0, phase.gpu_bytes - int(TIGHT_SHARE * room.gpu_bytes))
    return [
        _judged(phase, phase.gpu_bytes - over, room.gpu_bytes, "GPU memory"),
        _judged(phase, phase.host_bytes + stored_bytes + over, room.host_bytes, "host memory"),
    ]


def _judged(phase: Phase, need: int, have: int | None, where: str) -> Judged:
    if have is None:
        return Judged(phase.name, Fit.UNKNOWN, need, have, where)
    fit = Fit.DOES_NOT if need > have else Fit.TIGHT if need > TIGHT_SHARE * have else Fit.FITS
    return Judged(phase.name, fit, need, have, where)


def _worse(judged: Judged) -> tuple[int, float]:
    """What is missing counts most; a host whose memory nobody knows (a card fits many) counts least."""
    rank = {Fit.FITS: 1, Fit.TIGHT: 2, Fit.DOES_NOT: 3}.get(judged.fit, 2 if judged.where != "host memory" else 0)
    return rank, judged.need_bytes / max(1, judged.have_bytes or 1)


def room_text(room: Room) -> str:
    """`GH200 96 GB: 96.0 GiB of GPU memory, 480 GiB of host memory`."""
    if room.one_pool and room.gpu_bytes is not None:
        return f"{room.title}: one pool of {bytes_text(room.gpu_bytes)}"
    gpu = "" if room.gpu_bytes is None else f"{bytes_text(room.gpu_bytes)} of GPU memory"
    host = "host memory not known" if room.host_bytes is None else f"{bytes_text(room.host_bytes)} of host memory"
    return f"{room.title}: {', '.join(filter(None, (gpu, host)))}"
