"""Runs the driver contract over `cuda.py`: on the fake libcuda in every profile, and on a GPU if there is one.

emulator/test_superchip.py runs the same contract on the emulator.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from supertuner.memory.cuda import CudaDriver, open_cuda
from supertuner.memory.driver import NotAvailable
from tests.memory.bench import DriverBench, bench_abilities, needed_abilities
from tests.memory.contract import DriverContract
from tests.memory.on_fake import FakeProcessPool

CUDA = 13000 if int(version("cuda-bindings").split(".")[0]) >= 13 else 12090
"""The version of the driver that matches the bindings: those of 12 have no batch calls, whatever the driver."""
PROFILES: dict[str, dict[str, str | int]] = {
    "gh200": {"profile": "gh200", "driver": CUDA},
    "gh200 with CUDA 12.2": {"profile": "gh200", "driver": 12020},
    "two gh200": {"profile": "gh200", "driver": CUDA, "devices": 2},
    "gb10": {"profile": "gb10", "driver": CUDA},
    "pcie": {"profile": "pcie", "driver": CUDA},
    "no_uvm": {"profile": "no_uvm", "driver": CUDA},
    "managed but not concurrent": {"profile": "no_uvm", "driver": CUDA, "attr": "83=1"},
}
GH200_ABILITIES = frozenset({"prefetch", "oversubscription", "host page tables", "ats"})
ABILITIES: dict[str, frozenset[str]] = {
    "gh200": GH200_ABILITIES,
    "gh200 with CUDA 12.2": GH200_ABILITIES,
    "two gh200": GH200_ABILITIES,
    "gb10": frozenset({"prefetch", "one pool", "host page tables"}),
    "pcie": frozenset({"prefetch", "oversubscription", "no pageable access"}),
    "no_uvm": frozenset({"no managed memory", "no pageable access"}),
    "managed but not concurrent": frozenset({"managed without concurrent access", "no pageable access"}),
}
"""The abilities of each profile, known before a process starts; a test compares them with the fake driver."""


def profile_abilities(profile: str) -> frozenset[str]:
    version = int(PROFILES[profile]["driver"])
    return ABILITIES[profile] | {
        "discard" if version >= 13000 else "no discard",
        "page locations",
        "injected faults",
    }


def contract_cases() -> Iterator[Any]:
    """Every profile with every contract test that applies to it, and every value that the test is parametrised with."""
    for name, test in inspect.getmembers(DriverContract, inspect.isfunction):
        if not name.startswith("test_"):
            continue
        title = name.removeprefix("test_")
        marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
        assert len(marks) <= 1, f"{name} is parametrised twice, which this function does not unfold"
        cases = [(mark.args[0], value) for mark in marks for value in mark.args[1]]
        for profile in PROFILES:
            if not needed_abilities(test) <= profile_abilities(profile):
                continue
            for argument, value in cases:
                yield pytest.param(name, {argument: value}, profile, id=f"{title}-{value}-{profile}")
            if not cases:
                yield pytest.param(name, {}, profile, id=f"{title}-{profile}")


@pytest.mark.parametrize("profile", PROFILES)
def test_the_fake_driver_has_the_abilities_that_select_its_tests(fakes: FakeProcessPool, profile: str) -> None:
    assert fakes.run(PROFILES[profile], "tests.memory.bench:bench_abilities") == sorted(profile_abilities(profile))


@pytest.mark.parametrize(("test", "parameters", "profile"), list(contract_cases()))
def test_the_fake_driver_fulfils_the_contract(
    fakes: FakeProcessPool, test: str, parameters: dict[str, str], profile: str
) -> None:
    fakes.run(PROFILES[profile], f"tests.memory.contract:DriverContract.{test}", parameters)


@dataclass(frozen=True)
class RealBench:
    driver: CudaDriver
    hbm_bytes: int
    resident: None = None
    fail: None = None


class TestARealGpuFulfilsTheContract(DriverContract):
    __test__ = Path("/dev/nvidiactl").exists()  # collected only on a machine with NVIDIA's kernel driver

    @pytest.fixture
    def bench(self, request: pytest.FixtureRequest) -> DriverBench:
        driver = open_cuda()
        assert not isinstance(driver, NotAvailable), driver.reason
        bench = RealBench(driver, driver.devices()[0].total_bytes)
        missing = needed_abilities(request.function) - set(bench_abilities(bench))
        if missing:
            pytest.skip(f"this GPU lacks: {', '.join(sorted(missing))}")
        return bench
