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

from supertuner.memory.driver import Device, Driver, Missing


@dataclass(frozen=True, slots=True)
class Support:
    """Whether hints can do anything on a machine, and why."""

    supported: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Enabled:
    """Whether hints are given, and why. Printed where a run starts."""

    on: bool
    asked: bool | None
    """None: nobody said anything."""
    reason: str

    def __bool__(self) -> bool:
        return self.on

    def __str__(self) -> str:
        return f"residency hints {'on' if self.on else 'off'}: {self.reason}"


def decide(override: bool | None, setting: bool | None, cache_types: Sequence[str], support: Support) -> Enabled:
    """Asked for and supported, in the order of the table above."""
    asked, by = _asked(override, setting, cache_types)
    if asked is None:
        return Enabled(False, None, by)
    if not asked:
        return Enabled(False, False, by)
    if not support.supported:
        return Enabled(False, True, f"{by}, but {support.reason}")
    return Enabled(True, True, f"{by}; {support.reason}")


def supported(driver: Driver | Missing, device: int = 0) -> Support:
    """What a machine's driver says of hints. An answer that it would not give counts as no."""
    if isinstance(driver, Missing):
        return Support(False, driver.reason)
    found = next((one for one in driver.devices() if one.number == device), None)
    if found is None:
        return Support(False, f"the driver knows no GPU {device}")
    return device_support(found)


def device_support(device: Device) -> Support:
    if device.integrated:
        return Support(False, f"CPU and {device.name} share one pool of memory: there is nowhere to move anything")
    memories = []
    if device.managed and device.concurrent_managed:
        memories.append("managed memory")
    if device.pageable:
        through = " through the host's page tables" if device.host_page_tables else ""
        memories.append(f"ordinary memory{through}")
    if not memories:
        return Support(
            False, f"{device.name} has no managed memory that can be hinted, and cannot read ordinary memory"
        )
    return Support(True, f"{device.name} takes hints for {' and '.join(memories)}")


def _asked(override: bool | None, setting: bool | None, cache_types: Sequence[str]) -> tuple[bool | None, str]:
    if override is not None:
        return override, f"set_uvm_hint_override({override})"
    if setting is not None:
        return setting, f"gh200_optimizations.enable_uvm_hints is {str(setting).lower()}"
    if "unified_memory" in cache_types:
        return True, "a cache of type unified_memory asks for them"
    return None, "nothing asks for them"
