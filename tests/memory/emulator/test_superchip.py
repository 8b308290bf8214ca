"""The software superchip keeps the laws of a driver, on every profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from supertuner.memory.driver import AddressRange, MemoryLocation
from supertuner.memory.emulator.configuration import EmulatedMachine, InjectedFault
from supertuner.memory.emulator.superchip import EmulatedSuperchip
from supertuner.memory.machines import MACHINES
from tests.memory.contract import DriverLaws

HBM = 64 << 20
CARD = replace(EmulatedMachine.from_spec(MACHINES["h100-80-pcie"]), gpu_bytes=HBM)
PROFILES = {
    "gh200": replace(EmulatedMachine.from_spec(MACHINES["gh200-96"]), gpu_bytes=HBM),
    "gh200, CUDA 12": replace(EmulatedMachine.from_spec(MACHINES["gh200-96"]), gpu_bytes=HBM, version=12080),
    "gb10": replace(EmulatedMachine.from_spec(MACHINES["gb10"]), gpu_bytes=HBM),
    "pcie": replace(CARD, concurrent=False),
    "pcie, concurrent": CARD,
    "no_uvm": replace(CARD, managed=False, concurrent=False),
}


@dataclass(frozen=True)
class EmulatorBench:
    driver: EmulatedSuperchip
    hbm_bytes: int = HBM

    def resident(self, span: AddressRange) -> Mapping[MemoryLocation | None, int]:
        return self.driver.resident_pages(span)

    def fail(self, verb: str, error: str) -> None:
        self.driver.inject_fault(InjectedFault(verb, error))


@pytest.fixture(params=[(name, page) for name in PROFILES for page in (4096, 65536)], ids=lambda p: f"{p[0]}, {p[1]}")
def bench(request: pytest.FixtureRequest) -> EmulatorBench:
    name, page_bytes = request.param
    return EmulatorBench(EmulatedSuperchip(PROFILES[name], page_bytes=page_bytes))


class TestTheModelKeepsTheLaws(DriverLaws):
    pass
