"""Facts about the machine and its environment variables that affect step times, and how two machines differ in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from supertuner.core.host import HostFacts
from supertuner.core.types import JSON

COMPARED_VARIABLES: Final = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "CUDA_LAUNCH_BLOCKING", "LD_PRELOAD",
)  # fmt: skip
COMPARED_FACTS: Final = ("cpu", "cpus", "arch", "gpus")
"""Facts that must be equal for times to be comparable."""


def doctor_report(host: HostFacts, environ: Mapping[str, str]) -> dict[str, JSON]:
    """The doctor's report without its allocation test."""
    from supertuner.tools.doctor.doctor_report import build_report
    from supertuner.tools.doctor.examination import examine_machine

    return build_report(examine_machine(host, environ, None), (), ())


def comparable_facts(report: Mapping[str, Any]) -> dict[str, JSON]:
    """The facts of a doctor's report that a baseline stores."""
    host, driver = report["host"], report["driver"]
    return {
        "title": None if report["machine"] is None else report["machine"]["title"],
        "cpu": host["cpu_name"],
        "cpus": host["cpus"],
        "arch": host["arch"],
        "kernel": host["kernel"],
        "memory_bytes": host["memory_total"],
        "gpus": [gpu["name"] for gpu in report["gpus"]],
        "driver": driver["kernel_driver"],
        "cuda": driver["cuda_version"],
    }


def differences(old: Mapping[str, JSON], new: Mapping[str, JSON], names: Iterable[str] = COMPARED_FACTS) -> list[str]:
    """The facts or variables among `names` that differ, as text."""
    changed = [name for name in names if old.get(name) != new.get(name)]
    return [f"{name} was {_value_text(old.get(name))}, is {_value_text(new.get(name))}" for name in changed]


def compared_variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in COMPARED_VARIABLES if environ.get(name)}


def _value_text(value: JSON) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "not set" if value is None else str(value)
