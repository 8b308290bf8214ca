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
from supertuner.tools.doctor.allocation import AllocationTestResult, BandwidthMeasurement
from supertuner.tools.doctor.check_result import CheckStatus
from supertuner.tools.doctor.requirements import DoctorFindings
from supertuner.tools.doctor.system_snapshot import SystemSnapshot

DEFAULT_NAME: Final = "gh200_diagnostic_report.json"
REPORT_KIND: Final = "supertuner doctor"
SCHEMA_VERSION: Final = 1
"""Incremented when a field is removed or changes its meaning; new fields may be added at any time."""
MAX_REPORT_BYTES: Final = 16 * MIB
"""A larger file cannot be a doctor's report, so it is not read to find out."""


def build_report(
    findings: DoctorFindings, required: Sequence[str], unmet: Sequence[str], made_at: datetime | None = None
) -> dict[str, JSON]:
    snapshot = findings.snapshot
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
        "overflow": _overflow(snapshot.overflow_library),
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
    facts, around = snapshot.facts, snapshot.resources
    return {
        "arch": facts.arch,
        "kernel": facts.kernel,
        "cpu_name": facts.cpu_name,
        "cpus": facts.cpus,
        "page_bytes": facts.page_bytes,
        "memory_total": facts.memory_total,
        "memory_available": facts.memory_available,
        "host_available": around.host_available,
        "machine_memory": around.machine_memory,
        "swap_used": facts.swap_used,
        "numa_balancing": facts.numa_balancing,
        "transparent_hugepages": facts.transparent_hugepages,
        "nodes": [asdict(node) for node in facts.nodes],
        "uvm_parameters": dict(facts.uvm_parameters),
        "shm_bytes": around.shm_bytes,
        "shm_free": around.shm_free,
        "folder": around.folder,
        "folder_free": around.folder_free,
        "open_files": around.open_files,
        "compiler": around.compiler,
    }


def _gpu(gpu: GpuFacts) -> JSON:
    device: dict[str, Any] = asdict(gpu.device)
    return {
        **device,
        "machine": None if gpu.machine is None else gpu.machine.key,
        "nvml": None if gpu.nvml is None else asdict(gpu.nvml),
    }


def _overflow(library: Path | NotAvailable) -> JSON:
    if isinstance(library, NotAvailable):
        return {"built": None, "reason": library.reason}
    return {"built": str(library), "reason": None}


def _allocation(findings: DoctorFindings) -> JSON:
    result = findings.allocation
    was_run = isinstance(result, AllocationTestResult)
    fields: Mapping[str, JSON] = dict.fromkeys(
        ("asked_bytes", "tested_bytes", "gpu_bytes", "beyond_gpu_memory", "limited", "blocks", "verified", "problem")
    )
    if isinstance(result, AllocationTestResult):
        fields = {
            "asked_bytes": result.plan.requested_bytes,
            "tested_bytes": result.plan.nbytes,
            "gpu_bytes": result.gpu_bytes,
            "beyond_gpu_memory": result.exceeded_gpu_memory,
            "limited": result.plan.limit_reason or None,
            "blocks": result.plan.blocks,
            "verified": result.verified_blocks,
            "problem": result.refusal,
        }
    return {
        "made": was_run,
        "not_made": None if isinstance(result, AllocationTestResult) else result.reason,
        "passed": result.passed if isinstance(result, AllocationTestResult) else None,
        "figures": findings.snapshot.driver.figure_origin if was_run else None,
        **fields,
        "wrong": list(result.wrong_values) if isinstance(result, AllocationTestResult) else [],
        "notes": list(result.notes) if isinstance(result, AllocationTestResult) else [],
        "rates": [_bandwidth(rate) for rate in result.rates] if isinstance(result, AllocationTestResult) else [],
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
        raise SuperTunerError(
            f"--report {path}: its folder is not writable; name a file in a writable folder with --report"
        )
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
