"""Decides whether hints are on: they must be requested, and this machine must support them.

The first of these that is set decides the request:

    1. `set_uvm_hint_override(True or False)`           code, which overrides everything
    2. `gh200_optimizations.enable_uvm_hints`            the configuration, in its own order: SIMPLETUNER_GH200_ENABLE_…
                                                         < SUPERTUNER_GH200_OPTIMIZATIONS__… < file < --set < overrides
    3. `cache_config.*_cache_type: "unified_memory"`     caches that need hints
    4. none of them                                      off

Pure: the request and the driver's properties are inputs, the decision with its reason is the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from supertuner.memory.driver import DeviceProperties, Driver, NotAvailable, find_device


@dataclass(frozen=True, slots=True)
class HintSupport:
    """Whether hints have an effect on a machine, and why."""

    supported: bool
    reason: str


@dataclass(frozen=True, slots=True)
class HintDecision:
    """Whether hints are issued, and why. Printed when a run starts."""

    on: bool
    asked: bool | None
    """Whether hints were requested; None: nothing was set."""
    reason: str

    def __bool__(self) -> bool:
        return self.on

    def __str__(self) -> str:
        return f"residency hints {'on' if self.on else 'off'}: {self.reason}"


def decide_hints(
    override: bool | None, setting: bool | None, cache_types: Sequence[str], support: HintSupport
) -> HintDecision:
    """Combine request and support, in the order of the table above."""
    asked, requested_by = _requested(override, setting, cache_types)
    if not asked:
        return HintDecision(False, asked, requested_by)
    if not support.supported:
        return HintDecision(False, True, f"{requested_by}, but {support.reason}")
    return HintDecision(True, True, f"{requested_by}; {support.reason}")


def hint_support(driver: Driver | NotAvailable, device: int = 0) -> HintSupport:
    """Whether a machine's driver supports hints. A property that the driver does not report counts as no."""
    if isinstance(driver, NotAvailable):
        return HintSupport(False, driver.reason)
    gpu = find_device(driver, device)
    if gpu is None:
        return HintSupport(False, f"the driver has no GPU {device}")
    return device_hint_support(gpu)


def device_hint_support(gpu: DeviceProperties) -> HintSupport:
    if gpu.integrated:
        return HintSupport(False, f"CPU and {gpu.name} share one pool of memory, so there is no other to move to")
    memories = []
    if gpu.managed and gpu.concurrent_managed:
        memories.append("managed memory")
    if gpu.pageable:
        through = " through the host's page tables" if gpu.host_page_tables else ""
        memories.append(f"ordinary memory{through}")
    if not memories:
        return HintSupport(False, f"{gpu.name} has no managed memory that accepts hints, nor reads ordinary memory")
    return HintSupport(True, f"{gpu.name} accepts hints for {' and '.join(memories)}")


def _requested(override: bool | None, setting: bool | None, cache_types: Sequence[str]) -> tuple[bool | None, str]:
    if override is not None:
        return override, f"set_uvm_hint_override({override})"
    if setting is not None:
        return setting, f"gh200_optimizations.enable_uvm_hints is {str(setting).lower()}"
    if "unified_memory" in cache_types:
        return True, "a cache of type unified_memory requests them"
    return None, "nothing requests them"
