"""The doctor's report as versioned JSON; docs/doctor.md documents every field.

It is written durably. Without --overwrite it replaces only an earlier doctor's report.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from supertuner import __version__
from supertuner.core import durable
from supertuner.core.errors import SuperTunerError
from supertuner.core.types import JSON, MIB
from supertuner.memory.driver import NotAvailable
from supertuner.memory.probe import GpuFacts, MachineFacts
from supertuner.tools.doctor.allocation import BandwidthMeasurement
from supertuner.tools.doctor.allocation_plan import AllocationTestSkipped
from supertuner.tools.doctor.check_result import CheckStatus
from supertuner.tools.doctor.requirements import DoctorFindings
from supertuner.tools.doctor.system_snapshot import SystemSnapshot

DEFAULT_NAME: Final = "gh200_diagnostic_report.json"
REPORT_KIND: Final = "supertuner doctor"
SCHEMA_VERSION: Final = 1
"""Incremented when a field is removed or changes its meaning; new fields may be added at any time."""
HOST_FIELDS: Final = (
    "arch", "kernel", "cpu_name", "cpus", "page_bytes", "memory_total", "memory_available", "host_available",
    "machine_memory", "swap_used", "numa_balancing", "transparent_hugepages", "nodes", "uvm_parameters", "shm_bytes",
    "shm_free", "folder", "folder_free", "open_files", "compiler",
)  # fmt: skip
"""Fields of `MachineFacts` and `HostResources` in the order of the report."""
MAX_REPORT_BYTES: Final = 16 * MIB
"""A larger file cannot be a doctor's report, so it is not read to find out."""


def build_report(
    findings: DoctorFindings, required: Sequence[str], unmet: Sequence[str], made_at: datetime | None = None
) -> dict[str, JSON]:
    snapshot, library = findings.snapshot, findings.snapshot.overflow_library
    marks = [check.status for check in findings.checks]
    return {
        "report": REPORT_KIND,
        "schema": SCHEMA_VERSION,
        "made_at": (made_at or datetime.now(UTC)).isoformat(timespec="seconds"),
        "supertuner": __version__,
        "machine": _machine(snapshot.facts),
        "host": _host(snapshot),
        "driver": {
            "body": snapshot.driver.driver_kind,
            "library": snapshot.driver.library,
            "figures": snapshot.driver.figure_origin,
            "cuda_version": snapshot.facts.driver_version,
            "kernel_driver": snapshot.facts.nvidia_driver,
            "no_gpu_reason": snapshot.facts.no_gpu_reason,
        },
        "gpus": [_gpu(gpu) for gpu in snapshot.facts.gpus],
        "one_pool": snapshot.facts.one_pool,
        "ats": snapshot.facts.ats,
        "torch": asdict(snapshot.torch),
        "environment": {
            "variables": [asdict(variable) for variable in snapshot.variables],
            "allocator": dict(snapshot.allocator_variables),
            "visible_devices": snapshot.visible_devices,
            "settings": list(snapshot.setting_variables),
            "settings_problems": list(snapshot.settings_problems),
        },
        "hints": asdict(snapshot.hints),
        "overflow": {
            "built": None if isinstance(library, NotAvailable) else str(library),
            "reason": library.reason if isinstance(library, NotAvailable) else None,
        },
        "checks": [
            {"group": c.group, "name": c.name, "mark": c.status.value, "finding": c.finding, "remedy": c.remedy}
            for c in findings.checks
        ],
        "summary": {mark.value: marks.count(mark) for mark in CheckStatus},
        "allocation": _allocation(findings),
        "requirements": {"asked": list(required), "unmet": list(unmet)},
    }


def _machine(facts: MachineFacts) -> JSON:
    row = facts.machine
    return None if row is None else {"key": row.key, "title": row.title, "link": row.link}


def _host(snapshot: SystemSnapshot) -> JSON:
    facts, resources = snapshot.facts, snapshot.resources
    fields = {name: getattr(resources if hasattr(resources, name) else facts, name) for name in HOST_FIELDS}
    return fields | {"nodes": [asdict(node) for node in facts.nodes], "uvm_parameters": dict(facts.uvm_parameters)}


def _gpu(gpu: GpuFacts) -> JSON:
    device: dict[str, Any] = asdict(gpu.device)
    return {
        **device,
        "machine": None if gpu.machine is None else gpu.machine.key,
        "nvml": None if gpu.nvml is None else asdict(gpu.nvml),
    }


def _allocation(findings: DoctorFindings) -> JSON:
    result = findings.allocation
    if isinstance(result, AllocationTestSkipped):
        no_figures = dict.fromkeys(
            ("passed", "figures", "asked_bytes", "tested_bytes", "gpu_bytes", "beyond_gpu_memory", "limited", "blocks")
        )
        no_problems: dict[str, JSON] = {"verified": None, "problem": None, "wrong": [], "notes": [], "rates": []}
        return {"made": False, "not_made": result.reason, **no_figures, **no_problems}
    return {
        "made": True,
        "not_made": None,
        "passed": result.passed,
        "figures": findings.snapshot.driver.figure_origin,
        "asked_bytes": result.plan.requested_bytes,
        "tested_bytes": result.plan.nbytes,
        "gpu_bytes": result.gpu_bytes,
        "beyond_gpu_memory": result.exceeded_gpu_memory,
        "limited": result.plan.limit_reason or None,
        "blocks": result.plan.blocks,
        "verified": result.verified_blocks,
        "problem": result.refusal,
        "wrong": list(result.wrong_values),
        "notes": list(result.notes),
        "rates": [_bandwidth(rate) for rate in result.rates],
    }


def _bandwidth(measurement: BandwidthMeasurement) -> JSON:
    table = measurement.expected
    return {
        "name": measurement.name,
        "bytes": measurement.nbytes,
        "seconds": measurement.seconds,
        "bytes_s": measurement.bytes_s,
        "table_bytes_s": None if table is None else table.value,
        "table_source": None if table is None else table.source,
        "table_how": None if table is None else table.origin,
        "ratio": measurement.ratio,
    }


def report_bytes(report: Mapping[str, JSON]) -> bytes:
    """The report as JSON: what `--json` prints and the file contains."""
    return json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace")


def report_path(path: Path, overwrite: bool) -> Path:
    """The file to write, with links resolved so that a link stays a link. Raises SuperTunerError if it cannot be
    written; called before any test runs."""
    target = Path(os.path.realpath(path))
    if path == Path("-") or (path.exists() and not path.is_file()):
        raise SuperTunerError(f"--report {path}: is not a file; name a file, or use --json to print the report")
    if not target.parent.is_dir():
        raise SuperTunerError(f"--report {path}: {target.parent} is not a folder; create it, or name another file")
    if target.exists() and not overwrite and not is_doctor_report(target):
        raise SuperTunerError(
            f"{path} exists and is not a report of `supertuner doctor`; name another with --report, or give --overwrite"
        )
    if not os.access(target.parent, os.W_OK):
        raise SuperTunerError(f"--report {path}: its folder is not writable; name a file in a writable folder")
    return target


def is_doctor_report(path: Path) -> bool:
    """Whether a file is a doctor's report; False for one that cannot be read or is not JSON."""
    try:
        if path.stat().st_size > MAX_REPORT_BYTES:
            return False
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("report") == REPORT_KIND


def write_report(path: Path, report: Mapping[str, JSON]) -> None:
    durable.write_bytes(path, report_bytes(report) + b"\n")
