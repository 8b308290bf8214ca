"""One examination, from the first question to the last byte given back. The one file here that opens a driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from supertuner.core.events import Progress
from supertuner.core.host import Host
from supertuner.memory.cuda import open_cuda
from supertuner.memory.driver import Driver, Missing, Refused
from supertuner.memory.probe import Facts, free_gpu_bytes, host_available_bytes
from supertuner.memory.telemetry.nvml import open_nvml
from supertuner.tools.doctor.allocation import Bench, Clock, Trial
from supertuner.tools.doctor.allocation_checks import allocation_checks
from supertuner.tools.doctor.allocation_plan import Declined, Room, plan
from supertuner.tools.doctor.check import Check
from supertuner.tools.doctor.checks import Examined, all_checks
from supertuner.tools.doctor.situation import Situation, look, mapped_library


def examine(
    host: Host,
    environ: Mapping[str, str],
    scale: float | None,
    progress: Progress,
    show: Callable[[Sequence[Check]], None],
) -> Examined:
    """Look at this machine, show what was found, then try its memory (`scale`: None does not) and show that."""
    situation, driver = look_here(host, environ)
    checks = all_checks(situation)
    show(checks)
    tested: Trial | Declined = Declined("--skip-allocation")
    if scale is not None:
        stand_in = situation.behind.figures == "stand-in"
        tested = try_memory(situation.facts, driver, host, scale, progress, stand_in=stand_in)
    more = tuple(allocation_checks(tested, situation.behind.figures))
    show(more)
    return Examined(situation, (*checks, *more), tested)


def look_here(host: Host, environ: Mapping[str, str]) -> tuple[Situation, Driver | Missing]:
    """This machine, by NVIDIA's driver if it is there."""
    driver, nvml, folder = open_cuda(), open_nvml(), Path.cwd()
    library = None if isinstance(driver, Missing) else mapped_library(host)
    try:
        return look(host, driver, nvml, environ, folder=folder, library=library), driver
    except Refused as refusal:  # it has begun and does not answer: as good as none, and the rest is still to be told
        silent = Missing(f"the driver fails when it is asked for its GPUs: {refusal}")
        return look(host, silent, nvml, environ, folder=folder, library=library), silent


def try_memory(
    facts: Facts,
    driver: Driver | Missing,
    host: Host,
    scale: float,
    progress: Progress,
    clock: Clock = time.perf_counter,
    stand_in: bool = False,
) -> Trial | Declined:
    """The allocation test on the first GPU, as large as is safe right now."""
    if isinstance(driver, Missing) or not facts.gpus:
        return Declined("no GPU")
    gpu = facts.gpus[0]
    try:
        room = room_of(facts, driver, host)
    except Refused as refusal:
        return Declined(f"the driver refused: {refusal}", failed=True)
    planned = plan(replace(room, stand_in=stand_in), scale)
    if isinstance(planned, Declined):
        return planned
    return Bench(driver, gpu.device, gpu.machine, planned, clock, progress).run()


def room_of(facts: Facts, driver: Driver, host: Host) -> Room:
    """What there is to take, as of now. GPU memory that the kernel counts as its own is not host memory."""
    gpu = facts.gpus[0]
    free = free_gpu_bytes(facts, driver, host, gpu.device.number)
    return Room(
        gpu_bytes=gpu.device.total_bytes,
        gpu_free=0 if free is None else free,
        host_total=facts.memory_total,
        host_available=host_available_bytes(facts, host),
        managed=gpu.device.managed,
        concurrent=gpu.device.concurrent_managed,
        one_pool=facts.one_pool,
    )
