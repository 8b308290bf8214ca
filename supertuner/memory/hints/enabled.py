"""Whether hints are on: asked for, by the first of four voices that speaks, and supported on this machine.

    1. `set_uvm_hint_override(True or False)`           code, the last word
    2. `gh200_optimizations.enable_uvm_hints`            the configuration, in its own order: SIMPLETUNER_GH200_ENABLE_…
                                                         < SUPERTUNER_GH200_OPTIMIZATIONS__… < file < --set < overrides
    3. `cache_config.*_cache_type: "unified_memory"`     caches that ask for it
    4. nobody                                            off

Pure: what is asked and what the driver says go in, the decision with its reason comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from supertuner.memory.driver import DeviceProperties, Driver, NotAvailable


@dataclass(frozen=True, slots=True)
class HintSupport:
    """Whether hints can do anything on a machine, and why."""

    supported: bool
    reason: str


@dataclass(frozen=True, slots=True)
class HintDecision:
    """Whether hints are given, and why. Printed where a run starts."""

    on: bool
    asked: bool | None
    """None: nobody said anything."""
    reason: str

    def __bool__(self) -> bool:
        return self.on

    def __str__(self) -> str:
        return f"residency hints {'on' if self.on else 'off'}: {self.reason}"


def decide_hints(
    override: bool | None, setting: bool | None, cache_types: Sequence[str], support: HintSupport
) -> HintDecision:
    """Asked for and supported, in the order of the table above."""
    asked, requested_by = _requested(override, setting, cache_types)
    if asked is None:
        return HintDecision(False, None, requested_by)
    if not asked:
        return HintDecision(False, False, requested_by)
    if not support.supported:
        return HintDecision(False, True, f"{requested_by}, but {support.reason}")
    return HintDecision(True, True, f"{requested_by}; {support.reason}")


def hint_support(driver: Driver | NotAvailable, device: int = 0) -> HintSupport:
    """What a machine's driver says of hints. An answer that it would not give counts as no."""
    if isinstance(driver, NotAvailable):
        return HintSupport(False, driver.reason)
    properties = next((candidate for candidate in driver.devices() if candidate.number == device), None)
    if properties is None:
        return HintSupport(False, f"the driver knows no GPU {device}")
    return device_hint_support(properties)


def device_hint_support(device: DeviceProperties) -> HintSupport:
    if device.integrated:
        return HintSupport(False, f"CPU and {device.name} share one pool of memory: there is nowhere to move anything")
    memories = []
    if device.managed and device.concurrent_managed:
        memories.append("managed memory")
    if device.pageable:
        through = " through the host's page tables" if device.host_page_tables else ""
        memories.append(f"ordinary memory{through}")
    if not memories:
        return HintSupport(
            False, f"{device.name} has no managed memory that can be hinted, and cannot read ordinary memory"
        )
    return HintSupport(True, f"{device.name} takes hints for {' and '.join(memories)}")


def _requested(override: bool | None, setting: bool | None, cache_types: Sequence[str]) -> tuple[bool | None, str]:
    if override is not None:
        return override, f"set_uvm_hint_override({override})"
    if setting is not None:
        return setting, f"gh200_optimizations.enable_uvm_hints is {str(setting).lower()}"
    if "unified_memory" in cache_types:
        return True, "a cache of type unified_memory asks for them"
    return None, "nothing asks for them"
