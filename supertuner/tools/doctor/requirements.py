"""Every check in the order in which it is shown, and what `--require` may ask for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from supertuner.core.errors import OptionError
from supertuner.memory.driver import NotAvailable
from supertuner.tools.doctor.allocation import AllocationTestResult
from supertuner.tools.doctor.allocation_plan import AllocationTestSkipped
from supertuner.tools.doctor.check_result import CheckResult, CheckStatus
from supertuner.tools.doctor.gpu_checks import BATCH_CALLS_VERSION, gpu_checks
from supertuner.tools.doctor.host_checks import PAGE_64K_BYTES, host_checks
from supertuner.tools.doctor.software_checks import software_checks
from supertuner.tools.doctor.system_snapshot import SystemSnapshot


@dataclass(frozen=True, slots=True)
class DoctorFindings:
    """All findings: what requirements are held against."""

    snapshot: SystemSnapshot
    checks: tuple[CheckResult, ...]
    allocation: AllocationTestResult | AllocationTestSkipped

    @property
    def memory_corrupted(self) -> bool:
        """Memory did not hold what was written to it: no machine to train on, whatever was required."""
        return isinstance(self.allocation, AllocationTestResult) and bool(self.allocation.wrong_values)


def all_checks(snapshot: SystemSnapshot) -> tuple[CheckResult, ...]:
    return (*gpu_checks(snapshot), *software_checks(snapshot), *host_checks(snapshot))


@dataclass(frozen=True, slots=True)
class DoctorRequirement:
    description: str
    """For --help and the docs."""
    is_met: Callable[[DoctorFindings], bool | None]
    """None: nobody knows, which is not met."""


def _gpu_ability(name: str) -> Callable[[DoctorFindings], bool | None]:
    """What the driver says of the first GPU."""

    def met(found: DoctorFindings) -> bool | None:
        gpus = found.snapshot.facts.gpus
        answer: bool | None = getattr(gpus[0].device, name) if gpus else False
        return answer

    return met


def _has_batch_calls(findings: DoctorFindings) -> bool:
    version = findings.snapshot.facts.driver_version
    return version is not None and version >= BATCH_CALLS_VERSION


def _is_known_machine(findings: DoctorFindings) -> bool:
    row = findings.snapshot.facts.machine
    return row is not None and row.key != "cpu"


REQUIREMENTS: Final[Mapping[str, DoctorRequirement]] = {
    "gpu": DoctorRequirement("a GPU", lambda found: bool(found.snapshot.facts.gpus)),
    "known-machine": DoctorRequirement("a machine with a GPU that is in the table", _is_known_machine),
    "managed": DoctorRequirement("managed memory", _gpu_ability("managed")),
    "concurrent": DoctorRequirement("CPU and GPU use managed memory at once", _gpu_ability("concurrent_managed")),
    "ats": DoctorRequirement("the GPU uses the host's page tables", _gpu_ability("host_page_tables")),
    "direct": DoctorRequirement("the CPU reads GPU memory in place", _gpu_ability("direct_host_access")),
    "one-pool": DoctorRequirement("CPU and GPU share one pool", lambda found: found.snapshot.facts.one_pool),
    "batch-calls": DoctorRequirement("a driver for CUDA 13 or newer", _has_batch_calls),
    "cuda-torch": DoctorRequirement("a torch for CUDA that sees a GPU", lambda found: bool(found.snapshot.torch.sees)),
    "stock-torch": DoctorRequirement(
        "a torch that is known to be unpatched",
        lambda found: None if found.snapshot.torch.patched is None else not found.snapshot.torch.patched,
    ),
    "pages-64k": DoctorRequirement("pages of 64 KiB", lambda found: found.snapshot.facts.page_bytes == PAGE_64K_BYTES),
    "no-numa-balancing": DoctorRequirement(
        "NUMA balancing is off or not there", lambda found: not found.snapshot.facts.numa_balancing
    ),
    "no-swap": DoctorRequirement(
        "no swap in use",
        lambda found: None if found.snapshot.facts.swap_used is None else not found.snapshot.facts.swap_used,
    ),
    "overflow": DoctorRequirement(
        "the overflow allocator is built", lambda found: not isinstance(found.snapshot.overflow_library, NotAvailable)
    ),
    "hints": DoctorRequirement("residency hints would be on", lambda found: found.snapshot.hints.on),
    "allocation": DoctorRequirement(
        "the allocation test passed, beyond GPU memory",
        lambda found: (
            isinstance(found.allocation, AllocationTestResult)
            and found.allocation.passed
            and found.allocation.exceeded_gpu_memory
        ),
    ),
    "no-traps": DoctorRequirement(
        "no check is marked ✗", lambda found: not any(check.status is CheckStatus.BAD for check in found.checks)
    ),
}


def parse_requirements(text: str) -> tuple[str, ...]:
    """The names of `--require`, each once. An unknown one is refused with the list."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in REQUIREMENTS]
    if unknown or not names:
        what = f"{', '.join(unknown)} is not one of" if unknown else "names nothing; it takes"
        raise OptionError(f"--require {text!r}: {what} {', '.join(REQUIREMENTS)}")
    return names


def unmet_requirements(names: tuple[str, ...], findings: DoctorFindings) -> list[str]:
    """Requirements that are not met, in words: `ats: the GPU uses the host's page tables (not known)`."""
    answers = {name: REQUIREMENTS[name].is_met(findings) for name in names}
    unknown = {name: " (nobody says)" if answer is None else "" for name, answer in answers.items()}
    return [
        f"{name}: {REQUIREMENTS[name].description}{unknown[name]}" for name, answer in answers.items() if not answer
    ]
