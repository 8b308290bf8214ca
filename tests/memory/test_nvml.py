"""NVML through the real pynvml over a fake library: all values, some, none, and a GPU that falls off the bus."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from supertuner.core.types import MIB
from tests.fakes.fake_libraries import fake_nvml

SAMPLE_PROGRAM = """
import ctypes, dataclasses, json, sys
from supertuner.memory.driver import NotAvailable
from supertuner.memory.nvml import open_nvml

nvml = open_nvml()
if isinstance(nvml, NotAvailable):
    print(json.dumps({"missing": nvml.reason}))
    sys.exit()
library = ctypes.CDLL("libnvidia-ml.so.1")
answer = {
    "version": nvml.driver_version(),
    "gpus": [dataclasses.asdict(gpu) for gpu in nvml.gpus()],
    "samples": [[nvml.sample(index) for _ in range(3)] for index in range(2)],
    "memory_calls": library.fakenvml_calls(b"nvmlDeviceGetMemoryInfo"),
    "power_calls": library.fakenvml_calls(b"nvmlDeviceGetPowerUsage"),
}
nvml.close()
print(json.dumps(answer))
"""


def sample_in_process(folder: Path | None, profile: str) -> dict[str, Any]:
    """The result of a process that uses the fake NVML, or none."""
    environment = dict(os.environ, FAKENVML_PROFILE=profile, LD_LIBRARY_PATH=str(folder or ""))
    command = [sys.executable, "-W", "error", "-c", SAMPLE_PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_gh200_reports_all_values() -> None:
    answer = sample_in_process(fake_nvml(), "gh200")
    assert answer["version"] == "580.95.05"
    assert answer["gpus"] == [
        {
            "index": 0,
            "name": "NVIDIA GH200 480GB",
            "uuid": "GPU-fafafafa-fafa-fafa-fafa-fafafafafa00",
            "total_bytes": 97871 * MIB,
            "sm_clock_limit_mhz": 1980,
            "power_limit_w": 900.0,
        }
    ]
    assert answer["samples"][0][2] == {
        "used_bytes": 37871 * MIB,
        "free_bytes": 60000 * MIB,
        "gpu_busy_percent": 97,
        "memory_busy_percent": 41,
        "power_w": 412.5,
        "sm_clock_mhz": 1905,
        "temperature_c": 61,
    }


def test_values_that_a_gb10_does_not_report_are_absent_and_not_queried_again() -> None:
    answer = sample_in_process(fake_nvml(), "gb10")
    gpu, sample = answer["gpus"][0], answer["samples"][0][2]
    assert gpu["name"] == "NVIDIA GB10" and gpu["total_bytes"] is None and gpu["power_limit_w"] is None
    assert "used_bytes" not in sample and "free_bytes" not in sample
    assert sample["power_w"] == 38.25
    assert answer["memory_calls"] == 2, "once for the facts and once for the first sample"
    assert answer["power_calls"] == 3


def test_a_gpu_that_fell_off_the_bus_has_no_figures_and_the_other_gpu_does() -> None:
    answer = sample_in_process(fake_nvml(), "lost")
    assert answer["samples"][0] == [{}, {}, {}]
    assert answer["samples"][1][0]["free_bytes"] == 20000 * MIB
    assert [gpu["uuid"] and gpu["uuid"][-2:] for gpu in answer["gpus"]] == [None, "00"]
    assert answer["power_calls"] == 6, "it may come back, so it is queried again"


def test_an_unknown_index_has_no_figures() -> None:
    assert sample_in_process(fake_nvml(), "gh200")["samples"][1] == [{}, {}, {}]


def test_a_library_without_its_kernel_driver_is_not_available() -> None:
    assert sample_in_process(fake_nvml(), "no_driver") == {
        "missing": "NVML is installed, but the NVIDIA kernel driver is not loaded"
    }


@pytest.mark.requires(not Path("/dev/nvidiactl").exists(), reason="this machine has an NVIDIA driver")
def test_a_missing_library_is_not_available() -> None:
    assert sample_in_process(None, "gh200") == {"missing": "no NVML (libnvidia-ml.so.1) on this machine"}
