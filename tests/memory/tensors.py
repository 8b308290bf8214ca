"""Torch tensors over memory of a driver, for tests of hints: a hint only needs an address."""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass, field, replace

import torch

from supertuner.memory.driver import AddressRange, Driver, MemoryKind
from supertuner.memory.emulator.configuration import EmulatedMachine
from supertuner.memory.emulator.superchip import EmulatedSuperchip
from supertuner.memory.machines import MACHINES
from supertuner.memory.unified.dlpack import DLPackHeader

PAGE = 65536
HBM = 64 << 20
GH200 = replace(EmulatedMachine.from_spec(MACHINES["gh200-96"]), gpu_bytes=HBM)
GB10 = replace(EmulatedMachine.from_spec(MACHINES["gb10"]), gpu_bytes=HBM)
CARD = replace(EmulatedMachine.from_spec(MACHINES["h100-80-pcie"]), gpu_bytes=HBM)


def superchip(figures: EmulatedMachine = GH200) -> EmulatedSuperchip:
    return EmulatedSuperchip(figures, page_bytes=PAGE)


@dataclass
class DriverMemory:
    """Memory of one kind, and tensors over it. Several tensors over one address have separate storages, as in a memory
    pool.
    """

    driver: Driver
    kind: MemoryKind
    pages: int = 16
    span: AddressRange = field(init=False)

    def __post_init__(self) -> None:
        address = self.driver.allocate(self.kind, self.pages * PAGE)
        self.span = AddressRange(address, self.pages * PAGE)
        map_zeros(self.span)

    def tensor(self) -> torch.Tensor:
        """A new uint8 storage at this address. Never read: its values may not exist."""
        header = DLPackHeader(torch.device("cpu"))
        header.point_at(self.span.address, self.span.nbytes)
        return header.make_tensor()[0]


def map_zeros(span: AddressRange) -> None:
    """Map zeros at a modelled address, because a failing test prints its tensors."""
    mmap = ctypes.CDLL(None, use_errno=True).mmap
    mmap.restype, mmap.argtypes = (
        ctypes.c_ssize_t,
        [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long],
    )
    private, anonymous, no_reserve, fixed_if_free = 0x2, 0x20, 0x4000, 0x100000
    found = mmap(span.address, span.nbytes, 1, private | anonymous | no_reserve | fixed_if_free, -1, 0)
    assert found == span.address or ctypes.get_errno() == errno.EEXIST, os.strerror(ctypes.get_errno())


def host_tensor(pages: int = 16) -> torch.Tensor:
    """Page-aligned ordinary memory of this process."""
    memory = torch.zeros((pages + 1) * PAGE, dtype=torch.uint8)
    begin = -memory.data_ptr() % PAGE
    return memory[begin : begin + pages * PAGE]
