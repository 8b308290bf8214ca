"""The laws of a memory driver over `cuda.py`: on the fake libcuda in every profile, and on a GPU when there is one.

That the software superchip keeps the same laws is in test_model.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import pytest

from supertuner.memory.cuda import CudaDriver, open_cuda
from supertuner.memory.driver import NotAvailable
from tests.memory.bench import DriverBench
from tests.memory.contract import DriverLaws
from tests.memory.on_fake import FakeProcessPool

CUDA = 13000 if int(version("cuda-bindings").split(".")[0]) >= 13 else 12090
"""Of the driver that goes with the bindings: those of 12 have no batch calls, whatever the driver."""
PROFILES: dict[str, dict[str, str | int]] = {
    "gh200": {"profile": "gh200", "driver": CUDA},
    "gh200 with CUDA 12.2": {"profile": "gh200", "driver": 12020},
    "two gh200": {"profile": "gh200", "driver": CUDA, "devices": 2},
    "gb10": {"profile": "gb10", "driver": CUDA},
    "pcie": {"profile": "pcie", "driver": CUDA},
    "no_uvm": {"profile": "no_uvm", "driver": CUDA},
    "managed but not concurrent": {"profile": "no_uvm", "driver": CUDA, "attr": "83=1"},
}


def laws() -> Iterator[Any]:
    """Every law with every value it is parametrised by."""
    for name, law in inspect.getmembers(DriverLaws, inspect.isfunction):
        if not name.startswith("test_"):
            continue
        title = name.removeprefix("test_")
        marks = [mark for mark in getattr(law, "pytestmark", []) if mark.name == "parametrize"]
        assert len(marks) <= 1, f"{name} is parametrised twice, which this function does not unfold"
        for argument, value in [(mark.args[0], value) for mark in marks for value in mark.args[1]]:
            yield pytest.param(name, {argument: value}, id=f"{title}-{value}")
        if not marks:
            yield pytest.param(name, {}, id=title)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(("law", "parameters"), list(laws()))
def test_the_fake_driver_keeps_the_law(
    fakes: FakeProcessPool, profile: str, law: str, parameters: dict[str, str]
) -> None:
    fakes.run(PROFILES[profile], f"tests.memory.contract:Laws.{law}", parameters)


@dataclass(frozen=True)
class RealBench:
    driver: CudaDriver
    hbm_bytes: int
    resident: None = None
    fail: None = None


class TestARealGpuKeepsTheLaws(DriverLaws):
    @pytest.fixture
    def bench(self) -> DriverBench:
        driver = open_cuda()
        if isinstance(driver, NotAvailable):
            pytest.skip(driver.reason)
        return RealBench(driver, driver.devices()[0].total_bytes)
