"""All checks in display order, and the requirements that `--require` accepts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supertuner.core.errors import OptionError
from supertuner.memory.probe import MachineFacts
from supertuner.tools.doctor.allocation import AllocationTestResult
from supertuner.tools.doctor.allocation_plan import AllocationTestSkipped
from supertuner.tools.doctor.check_result import CheckResult, CheckStatus
from supertuner.tools.doctor.gpu_checks import BATCH_CALLS_VERSION, gpu_checks
from supertuner.tools.doctor.host_checks import HOST_CHECKS, PAGE_64K_BYTES
from supertuner.tools.doctor.software_checks import software_checks
from supertuner.tools.doctor.system_snapshot import SystemSnapshot
from supertuner.tools.doctor.torch_probe import TorchProbeResult


@dataclass(frozen=True, slots=True)
class DoctorFindings:
    """Everything that the doctor found; requirements are evaluated on it."""

    snapshot: SystemSnapshot
    checks: tuple[CheckResult, ...]
    allocation: AllocationTestResult | AllocationTestSkipped

    @property
    def facts(self) -> MachineFacts:
        return self.snapshot.facts

    @property
    def torch(self) -> TorchProbeResult:
        return self.snapshot.torch

    @property
    def torch_ignores_gpu(self) -> bool:
        """Whether there is a GPU and a torch that was built without support for any; training would use the CPU."""
        torch = self.torch
        return bool(self.facts.gpus) and torch.problem is None and torch.cuda is None and torch.hip is None

    @property
    def memory_corrupted(self) -> bool:
        """Whether memory returned other values than were written; such a machine must not be used for training."""
        return isinstance(self.allocation, AllocationTestResult) and bool(self.allocation.wrong_values)


def all_checks(snapshot: SystemSnapshot) -> tuple[CheckResult, ...]:
    return (*gpu_checks(snapshot), *software_checks(snapshot), *(check(snapshot) for check in HOST_CHECKS))


@dataclass(frozen=True, slots=True)
class DoctorRequirement:
    description: str
    """Shown when the requirement is not met, and in the docs."""
    is_met: Callable[[DoctorFindings], bool | None]
    """None means unknown, which counts as not met."""


def _gpu_ability(name: str) -> Callable[[DoctorFindings], bool | None]:
    """A property of the first GPU, as the driver reports it; False without a GPU."""

    def met(found: DoctorFindings) -> bool | None:
        answer: bool | None = getattr(found.facts.gpus[0].device, name) if found.facts.gpus else False
        return answer

    return met


def _negate(fact: float | None) -> bool | None:
    """Whether a fact is false or zero; None if it is unknown."""
    return None if fact is None else not fact


def _has_batch_calls(found: DoctorFindings) -> bool:
    version = found.facts.driver_version
    return version is not None and version >= BATCH_CALLS_VERSION


def _is_known_machine(found: DoctorFindings) -> bool:
    return found.facts.machine is not None and found.facts.machine.key != "cpu"


def _passed_beyond_gpu_memory(found: DoctorFindings) -> bool:
    result = found.allocation
    return isinstance(result, AllocationTestResult) and result.passed and result.exceeded_gpu_memory


REQUIREMENTS: Final[Mapping[str, DoctorRequirement]] = {
    "gpu": DoctorRequirement("a GPU", lambda found: bool(found.facts.gpus)),
    "known-machine": DoctorRequirement("a machine with a GPU from the table of machines", _is_known_machine),
    "managed": DoctorRequirement("managed memory", _gpu_ability("managed")),
    "concurrent": DoctorRequirement("CPU and GPU can use managed memory at once", _gpu_ability("concurrent_managed")),
    "ats": DoctorRequirement("the GPU uses the host's page tables", _gpu_ability("host_page_tables")),
    "direct": DoctorRequirement("the CPU reads GPU memory in place", _gpu_ability("direct_host_access")),
    "one-pool": DoctorRequirement("CPU and GPU share one pool", lambda found: found.facts.one_pool),
    "batch-calls": DoctorRequirement("a driver for CUDA 13 or newer", _has_batch_calls),
    "cuda-torch": DoctorRequirement("a CUDA build of torch that sees a GPU", lambda found: bool(found.torch.sees)),
    "stock-torch": DoctorRequirement("a torch that is known to be stock", lambda found: _negate(found.torch.patched)),
    "pages-64k": DoctorRequirement("pages of 64 KiB", lambda found: found.facts.page_bytes == PAGE_64K_BYTES),
    "no-numa-balancing": DoctorRequirement(
        "NUMA balancing is off or not in the kernel", lambda found: not found.facts.numa_balancing
    ),
    "no-swap": DoctorRequirement("no swap in use", lambda found: _negate(found.facts.swap_used)),
    "overflow": DoctorRequirement(
        "the overflow allocator is built", lambda found: isinstance(found.snapshot.overflow_library, Path)
    ),
    "hints": DoctorRequirement("residency hints would be on", lambda found: found.snapshot.hints.on),
    "allocation": DoctorRequirement("the allocation test passed, beyond GPU memory", _passed_beyond_gpu_memory),
    "no-traps": DoctorRequirement(
        "no check is marked ✗", lambda found: all(check.status is not CheckStatus.BAD for check in found.checks)
    ),
}


def parse_requirements(text: str) -> tuple[str, ...]:
    """The names in `--require`, without duplicates. Raises OptionError that lists all names if one is unknown."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in REQUIREMENTS]
    if unknown or not names:
        problem = f"unknown: {', '.join(unknown)}" if unknown else "names no requirement"
        raise OptionError(f"--require {text!r}: {problem}; choose from {', '.join(REQUIREMENTS)}")
    return names


def unmet_requirements(names: tuple[str, ...], findings: DoctorFindings) -> list[str]:
    """Requirements that are not met, as text: `ats: the GPU uses the host's page tables (unknown)`."""
    unmet = []
    for name in names:
        requirement = REQUIREMENTS[name]
        if not (is_met := requirement.is_met(findings)):
            unmet.append(f"{name}: {requirement.description}{' (unknown)' if is_met is None else ''}")
    return unmet
