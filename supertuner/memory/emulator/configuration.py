"""What the software superchip is told: a machine's figures, the parameters nobody has confirmed, the faults to play.

All of it is frozen data. `Figures.of` takes a row of `machines.py`; an unknown figure stays None, never zero.
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
"""The refusals that the model gives or plays, with CUDA's numbers for them."""


@dataclass(frozen=True, slots=True)
class EmulatedMachine:
    """One GPU, the host memory next to it, and what the driver would say of them."""

    name: str
    gpu_bytes: int
    """On a one-pool machine: the pool."""
    host_bytes: int | None = None
    """None: not known, and then host memory does not run out."""
    gpu_read_bytes_s: float | None = None
    gpu_write_bytes_s: float | None = None
    host_bytes_s: float | None = None
    to_device_bytes_s: float | None = None
    to_host_bytes_s: float | None = None
    one_pool: bool = False
    ats: bool = False
    """The GPU reads ordinary memory through the host's page tables, and the CPU reads the GPU's memory in place.

    Without it the GPU does not reach ordinary memory at all: Linux's HMM, which gives that to cards, is not modelled.
    """
    managed: bool = True
    concurrent: bool = True
    """CPU and GPU may use managed memory at once. Linux since Pascal: yes."""
    block_bytes: int = 2 * MIB
    version: int = 13000
    """Of the driver API."""

    @classmethod
    def from_spec(cls, machine: MachineSpec) -> EmulatedMachine:
        """The figures of a known machine. An NVIDIA driver is assumed, whoever made it."""
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
        """The GPU uses ordinary memory of the process."""
        return self.ats or self.one_pool

    @property
    def migrates_pages(self) -> bool:
        """There are two memories, and the driver may move managed pages between them at any time."""
        return self.managed and self.concurrent and not self.one_pool


@dataclass(frozen=True, slots=True)
class EmulatorParameters:
    """What decides costs and policy and is in no specification. Each says what it rests on."""

    fault_batch_s: float = 30e-6
    """Servicing one batch of page faults. Unconfirmed: tens of microseconds is what is reported."""
    fault_batch_pages: int = 256
    """Faults in a batch. The UVM driver's default for its batch; how many arrive together is up to the program."""
    counter_threshold: int = 256
    """Remote accesses to a block after which its pages follow. The UVM driver's default."""
    access_bytes: int = 128
    """What one counted access moves: a cache line. Unconfirmed; it decides only how soon a counter fills."""
    duplex: bool = False
    """Both directions of the link at full speed at once. Unknown for every machine; False is the careful answer."""
    hits_refresh: bool = True
    """Use of a page that is already on the GPU keeps it from eviction: true least-recently-used.

    The driver does not see such uses, so on a real GPU the order may be that of arrival (False). Unconfirmed.
    """


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """Refusals to play: `verb` of the seam fails as `name` from its `first` call on, `times` times."""

    verb: str
    name: str
    first: int = 1
    times: int = 1

    def __post_init__(self) -> None:
        assert self.name in ERROR_CODES, f"{self.name} is not among {', '.join(ERROR_CODES)}"

    def applies_to(self, call: int) -> bool:
        """Whether the `call`-th call of the verb, from 1 on, is to fail."""
        return self.first <= call < self.first + self.times


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """All that will go wrong."""

    faults: tuple[InjectedFault, ...] = ()


def _int_or_none(figure: MachineFigure) -> int | None:
    return None if figure.value is None else int(figure.value)
