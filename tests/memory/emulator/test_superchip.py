"""The software superchip fulfils the driver contract in every profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import pytest

from supertuner.memory.driver import AddressRange, MemoryLocation
from supertuner.memory.emulator.configuration import EmulatedMachine, InjectedFault
from supertuner.memory.emulator.superchip import EmulatedSuperchip
from supertuner.memory.machines import MACHINES
from tests.memory.bench import bench_abilities, needed_abilities
from tests.memory.contract import DriverContract

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


@cache
def profile_abilities(profile: str) -> frozenset[str]:
    return frozenset(bench_abilities(EmulatorBench(EmulatedSuperchip(PROFILES[profile]))))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each contract test on every profile that has the abilities it needs."""
    profiles = [name for name in PROFILES if needed_abilities(metafunc.function) <= profile_abilities(name)]
    cases = [(name, page) for name in profiles for page in (4096, 65536)]
    metafunc.parametrize("bench", cases, indirect=True, ids=lambda case: f"{case[0]}, {case[1]}")


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> EmulatorBench:
    name, page_bytes = request.param
    return EmulatorBench(EmulatedSuperchip(PROFILES[name], page_bytes=page_bytes))


class TestTheEmulatorFulfilsTheContract(DriverContract):
    pass
