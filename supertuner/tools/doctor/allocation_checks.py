"""Checks of the allocation test: one for the test itself, one for each measured bandwidth. Pure.

A bandwidth is compared with the table only if a real GPU was measured, not a model or a stand-in for libcuda.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from supertuner.core.types import bytes_text
from supertuner.tools.doctor.allocation import AllocationTestResult, BandwidthMeasurement, format_bandwidth
from supertuner.tools.doctor.allocation_plan import AllocationTestSkipped
from supertuner.tools.doctor.check_result import CheckResult, absent, bad, good, warning
from supertuner.tools.doctor.system_snapshot import FigureOrigin

GROUP: Final = "allocation"
SLOW_SHARE: Final = 0.6
"""A bandwidth below this share of the table's figure is a warning."""
CLOCK_NOTES: Final = {
    "measured": "",
    "modelled": " (modelled)",
    "stand-in": " (of a stand-in for libcuda; says nothing about a GPU)",
}


def allocation_checks(
    result: AllocationTestResult | AllocationTestSkipped, origin: FigureOrigin
) -> Iterator[CheckResult]:
    if isinstance(result, AllocationTestSkipped) and result.failed:
        remedy = "list the processes on the GPU and its compute mode: `nvidia-smi -q -d COMPUTE,PIDS`"
        yield bad(GROUP, "allocation test", f"could not start: {result.reason}", remedy)
        return
    if isinstance(result, AllocationTestSkipped):
        yield absent(GROUP, "allocation test", f"not run: {result.reason}")
        return
    yield check_allocation_result(result)
    for rate in result.rates:
        yield check_bandwidth(rate, origin)
    for number, note in enumerate(result.notes, 1):
        yield absent(GROUP, f"note {number}" if len(result.notes) > 1 else "note", note)


def check_allocation_result(result: AllocationTestResult) -> CheckResult:
    name, plan = "allocation test", result.plan
    size = f"{bytes_text(plan.nbytes)} of managed memory on a GPU with {bytes_text(result.gpu_bytes)}"
    if result.refusal is not None:
        remedy = "look for driver errors: `sudo dmesg | grep -i -E 'nvrm|xid'`; try a smaller --oversubscription-scale"
        return bad(GROUP, name, f"{size}: the driver reported an error: {result.refusal}", remedy)
    if result.wrong_values:
        commands = "`nvidia-smi -q -d ECC,PAGE_RETIREMENT` and `sudo dmesg | grep -i xid`"
        remedy = f"do not train on this machine; check {commands}"
        return bad(GROUP, name, f"{size}: WRONG VALUES: {_first_places(result.wrong_values)}", remedy)
    text = f"{size}: filled, {result.verified_blocks} of {plan.blocks} blocks verified by value"
    if plan.limit_reason and plan.remedy and not result.exceeded_gpu_memory:
        return warning(GROUP, name, f"{text}; {plan.limit_reason}", plan.remedy)
    return good(GROUP, name, f"{text}; {plan.limit_reason}" if plan.limit_reason else text)


def _first_places(places: list[str], shown: int = 2) -> str:
    more = len(places) - shown
    return "; ".join(places[:shown]) + (f"; and {more} more places" if more > 0 else "")


def check_bandwidth(measurement: BandwidthMeasurement, origin: FigureOrigin) -> CheckResult:
    text = format_bandwidth(measurement) + CLOCK_NOTES[origin]
    if origin == "measured" and measurement.ratio is not None and measurement.ratio < SLOW_SHARE:
        remedy = "look for other processes and throttled clocks: `nvidia-smi -q -d PERFORMANCE,CLOCK,PIDS`"
        return warning(GROUP, measurement.name, text, remedy)
    return good(GROUP, measurement.name, text)
