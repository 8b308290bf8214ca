"""How fast a machine does what a step asks of it, and how much memory a plan may use.

Peaks and bandwidths are those of `memory/machines.py`; what is unknown there stays None here. `compute_share` and any
rate may be replaced by what a run's counters say. A copy over the link also uses host memory, so no direction of the
link is faster than that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from supertuner.memory.emulator.configuration import EmulatedMachine
from supertuner.memory.machines import MachineSpec
from supertuner.plan.placement.step_table import OperatorWork

ComputePrecision: TypeAlias = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True, slots=True)
class MachineRates:
    matmul_flops: float | None
    """Of tensor cores, in the precision of the run."""
    other_flops: float | None
    gpu_bytes_s: float | None
    """The faster of reading and writing: a table does not tell one from the other."""
    host_bytes_s: float | None
    to_device_bytes_s: float | None
    to_host_bytes_s: float | None
    one_pool: bool
    duplex: bool = False
    """Both directions of the link at full speed at once: unknown of every machine, so not assumed."""
    compute_share: float = 1.0
    """Of the peaks, what kernels reach. 1: as fast as the maker prints; counters of a run say what it is."""

    @classmethod
    def from_machine(
        cls, machine: MachineSpec, precision: ComputePrecision = "bf16", *, compute_share: float = 1.0
    ) -> MachineRates:
        """The rates of a known machine. Without TF32, which torch does not use unless told to."""
        matmul = machine.fp32_flops if precision == "fp32" else machine.bf16_flops
        host = machine.host_bytes_s.value
        reads, writes = machine.gpu_read_bytes_s.value, machine.gpu_write_bytes_s.value
        return cls(
            matmul_flops=matmul.value,
            other_flops=machine.fp32_flops.value,
            gpu_bytes_s=None if reads is None or writes is None else max(reads, writes),
            host_bytes_s=host,
            to_device_bytes_s=_slower_rate(machine.to_device_bytes_s.value, host),
            to_host_bytes_s=_slower_rate(machine.to_host_bytes_s.value, host),
            one_pool=machine.one_pool,
            compute_share=compute_share,
        )

    @property
    def has_link(self) -> bool:
        """There is a second memory, and it is known how fast it is reached."""
        return not self.one_pool and self.to_device_bytes_s is not None and self.to_host_bytes_s is not None

    @property
    def unknown_rates(self) -> tuple[str, ...]:
        """Figures without which no step can be timed."""
        needed = {"matmul_flops": self.matmul_flops, "gpu_bytes_s": self.gpu_bytes_s}
        return tuple(name for name, value in needed.items() if value is None)

    def seconds(self, work: OperatorWork) -> float:
        """How long the work takes at least: tensor cores, other units and memory work beside each other.

        Where the speed of other arithmetic is unknown it is left out: such operators read and write more than they
        compute, so that memory decides.
        """
        assert self.matmul_flops is not None and self.gpu_bytes_s is not None, "a figure is unknown; see `unknown`"
        other = 0.0 if self.other_flops is None else work.other_flops / self.other_flops
        busiest = max(work.matmul_flops / self.matmul_flops, other, work.gpu_bytes / self.gpu_bytes_s)
        return busiest / self.compute_share

    def is_memory_bound(self, work: OperatorWork) -> bool:
        """Whether reading and writing the GPU's memory is what this work takes its time for."""
        assert self.matmul_flops is not None and self.gpu_bytes_s is not None, "a figure is unknown; see `unknown`"
        return work.gpu_bytes / self.gpu_bytes_s > work.matmul_flops / self.matmul_flops


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Memory that the step may use: what a machine has, less what others have of it."""

    gpu_bytes: int
    """On a one-pool machine: of the pool."""
    host_bytes: int | None
    """None: not known, and then a plan puts nothing there."""

    @classmethod
    def from_machine(cls, machine: MachineSpec, *, host_bytes: int | None = None) -> MemoryLimits:
        """All that the machine has; `host_bytes` for a card, whose host the table does not know."""
        assert machine.gpu_bytes.value is not None, f"{machine.title} has no GPU memory"
        host = machine.host_bytes.value if host_bytes is None else host_bytes
        return cls(int(machine.gpu_bytes.value), None if host is None else int(host))


def emulator_figures(name: str, rates: MachineRates, limits: MemoryLimits, *, ats: bool = False) -> EmulatedMachine:
    """The same machine for the software superchip."""
    return EmulatedMachine(
        name=name,
        gpu_bytes=limits.gpu_bytes,
        host_bytes=limits.host_bytes,
        gpu_read_bytes_s=rates.gpu_bytes_s,
        gpu_write_bytes_s=rates.gpu_bytes_s,
        host_bytes_s=rates.host_bytes_s,
        to_device_bytes_s=rates.to_device_bytes_s,
        to_host_bytes_s=rates.to_host_bytes_s,
        one_pool=rates.one_pool,
        ats=ats,
    )


def _slower_rate(link: float | None, memory: float | None) -> float | None:
    return link if link is None or memory is None else min(link, memory)
