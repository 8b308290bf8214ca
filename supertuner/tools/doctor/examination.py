"""Runs the whole examination: snapshot, checks, allocation test. Only this file opens a driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from supertuner.core.events import NullSink, Progress
from supertuner.core.host import HostFacts
from supertuner.memory.cuda import open_cuda
from supertuner.memory.driver import Driver, DriverError, NotAvailable
from supertuner.memory.nvml import open_nvml
from supertuner.memory.probe import MachineFacts, free_gpu_bytes, host_available_bytes
from supertuner.tools.doctor.allocation import AllocationTest, AllocationTestResult, ClockFunction
from supertuner.tools.doctor.allocation_checks import allocation_checks
from supertuner.tools.doctor.allocation_plan import AllocationTestSkipped, AvailableMemory, plan_allocation_test
from supertuner.tools.doctor.check_result import CheckResult
from supertuner.tools.doctor.requirements import DoctorFindings, all_checks
from supertuner.tools.doctor.system_snapshot import SystemSnapshot, mapped_library, take_snapshot


def examine_machine(
    host: HostFacts,
    environ: Mapping[str, str],
    scale: float | None,
    progress: Progress | None = None,
    show: Callable[[Sequence[CheckResult]], None] = lambda checks: None,
) -> DoctorFindings:
    """Check this machine, `show` the results, then run the allocation test and `show` its results.

    `scale` is the size of the allocation test as a multiple of GPU memory; None skips the test.
    """
    snapshot, driver = snapshot_this_machine(host, environ)
    checks = all_checks(snapshot)
    show(checks)
    test_result: AllocationTestResult | AllocationTestSkipped = AllocationTestSkipped("--skip-allocation")
    if scale is not None:
        stand_in = snapshot.driver.figure_origin == "stand-in"
        test_result = run_allocation_test(
            snapshot.facts, driver, host, scale, progress or NullSink(), stand_in=stand_in
        )
    test_checks = tuple(allocation_checks(test_result, snapshot.driver.figure_origin))
    show(test_checks)
    return DoctorFindings(snapshot, (*checks, *test_checks), test_result)


def snapshot_this_machine(host: HostFacts, environ: Mapping[str, str]) -> tuple[SystemSnapshot, Driver | NotAvailable]:
    """(the snapshot of this machine, NVIDIA's driver or the reason why it is not available)."""
    driver, nvml, folder = open_cuda(), open_nvml(), Path.cwd()
    library = None if isinstance(driver, NotAvailable) else mapped_library(host)
    try:
        return take_snapshot(host, driver, nvml, environ, folder=folder, library=library), driver
    except DriverError as refusal:  # the driver starts but cannot list GPUs: report the rest without it
        no_driver = NotAvailable(f"the driver cannot list its GPUs: {refusal}")
        return take_snapshot(host, no_driver, nvml, environ, folder=folder, library=library), no_driver


def run_allocation_test(
    facts: MachineFacts,
    driver: Driver | NotAvailable,
    host: HostFacts,
    scale: float,
    progress: Progress,
    clock: ClockFunction = time.perf_counter,
    stand_in: bool = False,
) -> AllocationTestResult | AllocationTestSkipped:
    """Run the allocation test on the first GPU, as large as is safe at this moment."""
    if isinstance(driver, NotAvailable) or not facts.gpus:
        return AllocationTestSkipped("no GPU")
    gpu = facts.gpus[0]
    try:
        memory = measure_available_memory(facts, driver, host)
    except DriverError as refusal:
        return AllocationTestSkipped(f"the driver reported an error: {refusal}", failed=True)
    test_plan = plan_allocation_test(replace(memory, stand_in=stand_in), scale)
    if isinstance(test_plan, AllocationTestSkipped):
        return test_plan
    return AllocationTest(driver, gpu.device, gpu.machine, test_plan, clock, progress).run()


def measure_available_memory(facts: MachineFacts, driver: Driver, host: HostFacts) -> AvailableMemory:
    """Memory that is available now. GPU memory that the kernel lists as a NUMA node does not count as host memory."""
    gpu = facts.gpus[0]
    free = free_gpu_bytes(facts, driver, host, gpu.device.number)
    return AvailableMemory(
        gpu_bytes=gpu.device.total_bytes,
        gpu_free=0 if free is None else free,
        host_total=facts.memory_total,
        host_available=host_available_bytes(facts, host),
        managed=gpu.device.managed,
        concurrent=gpu.device.concurrent_managed,
        one_pool=facts.one_pool,
    )
