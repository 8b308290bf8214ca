"""Inputs of the software superchip: the machine's figures, the parameters that no source confirms, and the faults to
inject.

All of it is frozen data. `EmulatedMachine.from_spec` converts a row of `machines.py`; an unknown figure stays None,
never zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from supertuner.core.errors import MemoryEngineError
from supertuner.core.types import MIB
from supertuner.memory.machines import MachineFigure, MachineSpec

ERROR_CODES: Final = {
    "CUDA_ERROR_INVALID_VALUE": 1,
    "CUDA_ERROR_OUT_OF_MEMORY": 2,
    "CUDA_ERROR_INVALID_DEVICE": 101,
    "CUDA_ERROR_NOT_FOUND": 500,
    "CUDA_ERROR_ILLEGAL_ADDRESS": 700,
    "CUDA_ERROR_NOT_PERMITTED": 800,
    "CUDA_ERROR_NOT_SUPPORTED": 801,
    "CUDA_ERROR_SYSTEM_NOT_READY": 802,
    "CUDA_ERROR_UNKNOWN": 999,
}
"""The errors that the model raises or injects, with CUDA's numbers for them."""


@dataclass(frozen=True, slots=True)
class EmulatedMachine:
    """One GPU, the host memory next to it, and the properties that their driver would report."""

    name: str
    gpu_bytes: int
    """On a one-pool machine, the size of the pool."""
    host_bytes: int | None = None
    """None: unknown, and host memory never runs out."""
    gpu_read_bytes_s: float | None = None
    gpu_write_bytes_s: float | None = None
    host_bytes_s: float | None = None
    to_device_bytes_s: float | None = None
    to_host_bytes_s: float | None = None
    one_pool: bool = False
    ats: bool = False
    """The GPU reads ordinary memory through the host's page tables, and the CPU reads GPU memory in place.

    Without it the GPU cannot access ordinary memory at all: Linux HMM, which allows that on cards, is not modelled.
    """
    managed: bool = True
    concurrent: bool = True
    """CPU and GPU can use managed memory concurrently. True on Linux since Pascal."""
    block_bytes: int = 2 * MIB
    version: int = 13000
    """Version of the driver API."""

    @classmethod
    def from_spec(cls, machine: MachineSpec) -> EmulatedMachine:
        """The figures of a known machine. Assumes an NVIDIA driver, whatever the manufacturer."""
        if machine.gpu_bytes.value is None:
            raise MemoryEngineError(f"{machine.title} has no GPU memory to model: {machine.gpu_bytes.source}")
        return cls(
            name=machine.title,
            gpu_bytes=int(machine.gpu_bytes.value),
            host_bytes=_int_or_none(machine.host_bytes),
            gpu_read_bytes_s=machine.gpu_read_bytes_s.value,
            gpu_write_bytes_s=machine.gpu_write_bytes_s.value,
            host_bytes_s=machine.host_bytes_s.value,
            to_device_bytes_s=machine.to_device_bytes_s.value,
            to_host_bytes_s=machine.to_host_bytes_s.value,
            one_pool=machine.one_pool,
            ats=machine.ats,
            block_bytes=_int_or_none(machine.driver_block_bytes) or 2 * MIB,
        )

    @property
    def gpu_reads_host_memory(self) -> bool:
        """Whether the GPU can access ordinary memory of the process."""
        return self.ats or self.one_pool


@dataclass(frozen=True, slots=True)
class EmulatorParameters:
    """Parameters of costs and policy that no specification contains. Each states its basis."""

    fault_batch_s: float = 30e-6
    """Seconds to service one batch of page faults. Unconfirmed: tens of microseconds are reported."""
    fault_batch_pages: int = 256
    """Faults per batch. The default of the UVM driver; how many arrive together depends on the program."""
    counter_threshold: int = 256
    """Remote accesses to a block after which its pages migrate. The default of the UVM driver."""
    access_bytes: int = 128
    """Bytes of one counted access: a cache line. Unconfirmed; it only affects how soon a counter fills."""
    duplex: bool = False
    """Whether both directions of the link run at full speed concurrently. Unknown for every machine; False is the
    conservative choice.
    """
    hits_refresh: bool = True
    """Whether using a page on the GPU postpones its eviction: true least-recently-used order.

    The driver does not observe such uses, so on a real GPU the order may be that of arrival (False). Unconfirmed.
    """


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """An injected error: the driver method `verb` raises `name` from its `first` call on, `times` times."""

    verb: str
    name: str
    first: int = 1
    times: int = 1

    def __post_init__(self) -> None:
        assert self.name in ERROR_CODES, f"{self.name} is not among {', '.join(ERROR_CODES)}"

    def applies_to(self, call: int) -> bool:
        """Whether the `call`-th call of the method, counted from 1, fails."""
        return self.first <= call < self.first + self.times


def _int_or_none(figure: MachineFigure) -> int | None:
    return None if figure.value is None else int(figure.value)
