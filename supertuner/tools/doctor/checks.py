"""Every check in the order in which it is shown, and what `--require` may ask for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from supertuner.core.errors import OptionError
from supertuner.memory.driver import Missing
from supertuner.tools.doctor.allocation import Trial
from supertuner.tools.doctor.allocation_plan import Declined
from supertuner.tools.doctor.check import Check, Mark
from supertuner.tools.doctor.gpu_checks import BATCH_CALLS, gpu_checks
from supertuner.tools.doctor.host_checks import PAGE_64K, host_checks
from supertuner.tools.doctor.situation import Situation
from supertuner.tools.doctor.software_checks import software_checks


@dataclass(frozen=True, slots=True)
class Examined:
    """All findings: what requirements are held against."""

    situation: Situation
    checks: tuple[Check, ...]
    allocation: Trial | Declined

    @property
    def spoilt(self) -> bool:
        """Memory did not hold what was written to it: no machine to train on, whatever was required."""
        return isinstance(self.allocation, Trial) and bool(self.allocation.wrong)


def all_checks(situation: Situation) -> tuple[Check, ...]:
    return (*gpu_checks(situation), *software_checks(situation), *host_checks(situation))


@dataclass(frozen=True, slots=True)
class Requirement:
    meaning: str
    """For --help and the docs."""
    met: Callable[[Examined], bool | None]
    """None: nobody knows, which is not met."""


def _gpu(name: str) -> Callable[[Examined], bool | None]:
    """What the driver says of the first GPU."""

    def met(found: Examined) -> bool | None:
        gpus = found.situation.facts.gpus
        answer: bool | None = getattr(gpus[0].device, name) if gpus else False
        return answer

    return met


def _batch_calls(found: Examined) -> bool:
    version = found.situation.facts.driver_version
    return version is not None and version >= BATCH_CALLS


def _known(found: Examined) -> bool:
    row = found.situation.facts.machine
    return row is not None and row.key != "cpu"


REQUIREMENTS: Final[Mapping[str, Requirement]] = {
    "gpu": Requirement("a GPU", lambda found: bool(found.situation.facts.gpus)),
    "known-machine": Requirement("a machine with a GPU that is in the table", _known),
    "managed": Requirement("managed memory", _gpu("managed")),
    "concurrent": Requirement("CPU and GPU use managed memory at once", _gpu("concurrent_managed")),
    "ats": Requirement("the GPU uses the host's page tables", _gpu("host_page_tables")),
    "direct": Requirement("the CPU reads GPU memory in place", _gpu("direct_host_access")),
    "one-pool": Requirement("CPU and GPU share one pool", lambda found: found.situation.facts.one_pool),
    "batch-calls": Requirement("a driver for CUDA 13 or newer", _batch_calls),
    "cuda-torch": Requirement("a torch for CUDA that sees a GPU", lambda found: bool(found.situation.torch.sees)),
    "stock-torch": Requirement(
        "a torch that is known to be unpatched",
        lambda found: None if found.situation.torch.patched is None else not found.situation.torch.patched,
    ),
    "pages-64k": Requirement("pages of 64 KiB", lambda found: found.situation.facts.page_bytes == PAGE_64K),
    "no-numa-balancing": Requirement(
        "NUMA balancing is off or not there", lambda found: not found.situation.facts.numa_balancing
    ),
    "no-swap": Requirement(
        "no swap in use",
        lambda found: None if found.situation.facts.swap_used is None else not found.situation.facts.swap_used,
    ),
    "overflow": Requirement(
        "the overflow allocator is built", lambda found: not isinstance(found.situation.overflow, Missing)
    ),
    "hints": Requirement("residency hints would be on", lambda found: found.situation.hints.on),
    "allocation": Requirement(
        "the allocation test passed, beyond GPU memory",
        lambda found: isinstance(found.allocation, Trial) and found.allocation.passed and found.allocation.beyond,
    ),
    "no-traps": Requirement(
        "no check is marked ✗", lambda found: not any(check.mark is Mark.BAD for check in found.checks)
    ),
}


def required(text: str) -> tuple[str, ...]:
    """The names of `--require`, each once. An unknown one is refused with the list."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in REQUIREMENTS]
    if unknown or not names:
        what = f"{', '.join(unknown)} is not one of" if unknown else "names nothing; it takes"
        raise OptionError(f"--require {text!r}: {what} {', '.join(REQUIREMENTS)}")
    return names


def unmet(names: tuple[str, ...], found: Examined) -> list[str]:
    """Requirements that are not met, in words: `ats: the GPU uses the host's page tables (not known)`."""
    answers = {name: REQUIREMENTS[name].met(found) for name in names}
    unknown = {name: " (nobody says)" if answer is None else "" for name, answer in answers.items()}
    return [f"{name}: {REQUIREMENTS[name].meaning}{unknown[name]}" for name, answer in answers.items() if not answer]
