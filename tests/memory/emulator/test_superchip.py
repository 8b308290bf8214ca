"""The software superchip keeps the laws of a driver, on every profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from supertuner.memory.driver import Home, Span
from supertuner.memory.emulator.figures import Fault, Figures
from supertuner.memory.emulator.superchip import Superchip
from supertuner.memory.machines import MACHINES
from tests.memory.contract import Laws

HBM = 64 << 20
CARD = replace(Figures.of(MACHINES["h100-80-pcie"]), gpu_bytes=HBM)
PROFILES = {
    "gh200": replace(Figures.of(MACHINES["gh200-96"]), gpu_bytes=HBM),
    "gh200, CUDA 12": replace(Figures.of(MACHINES["gh200-96"]), gpu_bytes=HBM, version=12080),
    "gb10": replace(Figures.of(MACHINES["gb10"]), gpu_bytes=HBM),
    "pcie": replace(CARD, concurrent=False),
    "pcie, concurrent": CARD,
    "no_uvm": replace(CARD, managed=False, concurrent=False),
}


@dataclass(frozen=True)
class ModelBench:
    driver: Superchip
    hbm_bytes: int = HBM

    def resident(self, span: Span) -> Mapping[Home | None, int]:
        return self.driver.resident(span)

    def fail(self, verb: str, error: str) -> None:
        self.driver.inject(Fault(verb, error))


@pytest.fixture(params=[(name, page) for name in PROFILES for page in (4096, 65536)], ids=lambda p: f"{p[0]}, {p[1]}")
def bench(request: pytest.FixtureRequest) -> ModelBench:
    name, page_bytes = request.param
    return ModelBench(Superchip(PROFILES[name], page_bytes=page_bytes))


class TestTheModelKeepsTheLaws(Laws):
    pass
