"""Telemetry over torch's real caching allocator and the fake driver: the figures follow what is allocated."""

from __future__ import annotations

import torch

from supertuner.core.host import HostFacts
from supertuner.core.types import MIB
from supertuner.memory.cuda import open_cuda
from supertuner.memory.driver import NotAvailable
from supertuner.memory.probe import probe_machine
from supertuner.memory.telemetry.sampler import GpuTelemetry, MemorySampler

NO_NVML = NotAvailable("none on the phantom")


def test_torchs_and_the_drivers_figures_follow_an_allocation() -> None:
    device, host, driver = torch.device("cuda", 0), HostFacts(), open_cuda()
    gpu = GpuTelemetry(driver, NO_NVML, torch_device=device)
    with MemorySampler(probe_machine(host, driver, NO_NVML), host, gpu) as sampler:
        torch.cuda.init()
        before = sampler.sample()
        held = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
        during = sampler.sample()
        assert during["torch.allocated_bytes"] - before["torch.allocated_bytes"] == held.nbytes
        assert during["torch.reserved_bytes"] - before["torch.reserved_bytes"] >= held.nbytes
        assert before["gpu.free_bytes"] - during["gpu.free_bytes"] >= held.nbytes
        del held
        after = sampler.sample()
        assert after["torch.allocated_bytes"] == before["torch.allocated_bytes"]
        assert after["torch.allocated_peak_bytes"] == during["torch.allocated_bytes"]
        assert after["torch.alloc_retries"] == 0


def test_the_phantom_is_recognised_as_the_machine_it_plays() -> None:
    facts = probe_machine(HostFacts(), open_cuda(), NO_NVML)
    assert facts.machine is not None and facts.machine.key == "gh200-96"
    assert facts.ats is True and facts.one_pool is False
