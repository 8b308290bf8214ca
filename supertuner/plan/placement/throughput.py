"""The rates of a machine, which times are modelled from, and the memory that a plan may use.

Peak rates and bandwidths come from `memory/machines.py`; an unknown figure is None. A run's counters can replace
`compute_share` and the rates of the link. A copy over the link also reads or writes host memory, so a direction of the
link is never faster than host memory.
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
    """Of tensor cores in the precision of the run, per second."""
    other_flops: float | None
    gpu_bytes_s: float | None
    """The faster of reading and writing: a step table counts both together."""
    host_bytes_s: float | None
    to_device_bytes_s: float | None
    to_host_bytes_s: float | None
    one_pool: bool
    duplex: bool = False
    """Whether both directions of the link reach full speed at once. Unknown for every machine, so not assumed."""
    compute_share: float = 1.0
    """Share of the peak rates that kernels reach. 1 is the vendor's figure; a run's counters show the real share."""

    @classmethod
    def from_machine(
        cls, machine: MachineSpec, precision: ComputePrecision = "bf16", *, compute_share: float = 1.0
    ) -> MachineRates:
        """The rates of a known machine. fp32 without TF32, which torch does not use by default."""
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
        """Whether there is a second memory and the bandwidth to it is known."""
        return not self.one_pool and self.to_device_bytes_s is not None and self.to_host_bytes_s is not None

    @property
    def unknown_rates(self) -> tuple[str, ...]:
        """Names of missing rates without which no step can be timed."""
        needed = {"matmul_flops": self.matmul_flops, "gpu_bytes_s": self.gpu_bytes_s}
        return tuple(name for name, value in needed.items() if value is None)

    def seconds(self, work: OperatorWork) -> float:
        """The roofline model (Williams et al., 2009): tensor cores, other units and memory work in parallel, so the
        slowest of the three determines the time.

        If the rate of other arithmetic is unknown it is left out: such operators are bound by memory.
        """
        assert self.matmul_flops is not None and self.gpu_bytes_s is not None, "a rate is unknown; see `unknown_rates`"
        other = 0.0 if self.other_flops is None else work.other_flops / self.other_flops
        busiest = max(work.matmul_flops / self.matmul_flops, other, work.gpu_bytes / self.gpu_bytes_s)
        return busiest / self.compute_share

    def round_trip_s(self, nbytes: float) -> float:
        """Time to copy to the host and back over the link."""
        assert self.to_device_bytes_s is not None and self.to_host_bytes_s is not None, "there is no link"
        return nbytes / self.to_device_bytes_s + nbytes / self.to_host_bytes_s

    def is_memory_bound(self, work: OperatorWork) -> bool:
        """Whether memory traffic takes longer than the matrix products."""
        assert self.matmul_flops is not None and self.gpu_bytes_s is not None, "a rate is unknown; see `unknown_rates`"
        return work.gpu_bytes / self.gpu_bytes_s > work.matmul_flops / self.matmul_flops


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """The memory that a step may use: the machine's, without what else is in it."""

    gpu_bytes: int
    """On a one-pool machine: the whole pool."""
    host_bytes: int | None
    """None: unknown; a plan then puts nothing there."""

    @classmethod
    def from_machine(cls, machine: MachineSpec, *, host_bytes: int | None = None) -> MemoryLimits:
        """Limits that allow all GPU memory and all host memory. `host_bytes` is needed for a graphics card: the table
        of machines does not know its host."""
        assert machine.gpu_bytes.value is not None, f"{machine.title} has no GPU memory"
        host = machine.host_bytes.value if host_bytes is None else host_bytes
        return cls(int(machine.gpu_bytes.value), None if host is None else int(host))


def emulator_figures(name: str, rates: MachineRates, limits: MemoryLimits, *, ats: bool = False) -> EmulatedMachine:
    """The machine as the emulator's configuration (`memory/emulator`)."""
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
