"""The allocation test, judged: one check for the test, one for each figure. Pure.

A figure is judged by the table only where a GPU was behind it: nothing follows from the model's clock or a stand-in's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from supertuner.core.types import bytes_text
from supertuner.tools.doctor.allocation import Rate, Trial, rate_text
from supertuner.tools.doctor.allocation_plan import Declined
from supertuner.tools.doctor.check import Check, absent, bad, good, warning
from supertuner.tools.doctor.situation import Origin

GROUP: Final = "allocation"
SLOW: Final = 0.6
"""A share of the table's figure below which something is in the way."""
CLOCKS: Final = {"measured": "", "modelled": " (modelled)", "stand-in": " (a stand-in's clock: nothing about a GPU)"}


def allocation_checks(found: Trial | Declined, figures: Origin) -> Iterator[Check]:
    if isinstance(found, Declined) and found.failed:
        remedy = "see who has the GPU, and in which mode: `nvidia-smi -q -d COMPUTE,PIDS`"
        yield bad(GROUP, "allocation test", f"could not begin: {found.reason}", remedy)
        return
    if isinstance(found, Declined):
        yield absent(GROUP, "allocation test", f"not made: {found.reason}")
        return
    yield verdict(found)
    for rate in found.rates:
        yield speed(rate, figures)
    for number, note in enumerate(found.notes, 1):
        yield absent(GROUP, f"note {number}" if len(found.notes) > 1 else "note", note)


def verdict(found: Trial) -> Check:
    name, plan = "allocation test", found.plan
    size = f"{bytes_text(plan.nbytes)} of managed memory on a GPU with {bytes_text(found.gpu_bytes)}"
    if found.problem is not None:
        remedy = "see what the driver met: `sudo dmesg | grep -i -E 'nvrm|xid'`; try a smaller --oversubscription-scale"
        return bad(GROUP, name, f"{size}: the driver refused: {found.problem}", remedy)
    if found.wrong:
        remedy = "do not train on this: `nvidia-smi -q -d ECC,PAGE_RETIREMENT` and `sudo dmesg | grep -i xid` first"
        return bad(GROUP, name, f"{size}: WRONG VALUES: {_first(found.wrong)}", remedy)
    text = f"{size}: filled, {found.verified} of {plan.blocks} blocks verified by value"
    if plan.limited and plan.remedy and not found.beyond:
        return warning(GROUP, name, f"{text}; {plan.limited}", plan.remedy)
    return good(GROUP, name, f"{text}; {plan.limited}" if plan.limited else text)


def _first(places: list[str], told: int = 2) -> str:
    more = len(places) - told
    return "; ".join(places[:told]) + (f"; and {more} more places" if more > 0 else "")


def speed(rate: Rate, figures: Origin) -> Check:
    text = rate_text(rate) + CLOCKS[figures]
    if figures == "measured" and rate.ratio is not None and rate.ratio < SLOW:
        remedy = "see who else is at work and what holds the clocks down: `nvidia-smi -q -d PERFORMANCE,CLOCK,PIDS`"
        return warning(GROUP, rate.name, text, remedy)
    return good(GROUP, rate.name, text)
