"""The doctor's report: everything that was found, as JSON with a version; docs/doctor.md names every field.

It is written durably, and never over a file that is not a report of ours, nor over anything that is no file.
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
from supertuner.memory.driver import Missing
from supertuner.memory.probe import Facts, GpuFacts
from supertuner.tools.doctor.allocation import Rate, Trial
from supertuner.tools.doctor.check import Mark
from supertuner.tools.doctor.checks import Examined
from supertuner.tools.doctor.situation import Situation

DEFAULT_NAME: Final = "gh200_diagnostic_report.json"
OURS: Final = "supertuner doctor"
SCHEMA: Final = 1
"""Goes up when a field changes its meaning or goes away; new fields may come at any time."""
LARGEST: Final = 16 * MIB
"""A file above this is no report of ours, and is not read to find out."""


def document(
    found: Examined, asked: Sequence[str], unmet: Sequence[str], made_at: datetime | None = None
) -> dict[str, JSON]:
    situation = found.situation
    marks = [check.mark for check in found.checks]
    return {
        "report": OURS,
        "schema": SCHEMA,
        "made_at": (made_at or datetime.now(UTC)).isoformat(timespec="seconds"),
        "supertuner": __version__,
        "machine": _machine(situation.facts),
        "host": _host(situation),
        "driver": {
            "body": situation.behind.body,
            "library": situation.behind.library,
            "figures": situation.behind.figures,
            "cuda_version": situation.facts.driver_version,
            "kernel_driver": situation.facts.nvidia_driver,
            "no_gpu_reason": situation.facts.no_gpu_reason,
        },
        "gpus": [_gpu(gpu) for gpu in situation.facts.gpus],
        "one_pool": situation.facts.one_pool,
        "ats": situation.facts.ats,
        "torch": asdict(situation.torch),
        "environment": {
            "variables": [asdict(variable) for variable in situation.variables],
            "allocator": dict(situation.allocator),
            "visible_devices": situation.visible,
            "settings": list(situation.settings),
            "settings_problems": list(situation.settings_problems),
        },
        "hints": asdict(situation.hints),
        "overflow": _overflow(situation.overflow),
        "checks": [
            {"group": c.group, "name": c.name, "mark": c.mark.value, "finding": c.finding, "remedy": c.remedy}
            for c in found.checks
        ],
        "summary": {mark.value: marks.count(mark) for mark in Mark},
        "allocation": _allocation(found),
        "requirements": {"asked": list(asked), "unmet": list(unmet)},
    }


def _machine(facts: Facts) -> JSON:
    row = facts.machine
    return None if row is None else {"key": row.key, "title": row.title, "link": row.link}


def _host(situation: Situation) -> JSON:
    facts, around = situation.facts, situation.around
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


def _overflow(found: Path | Missing) -> JSON:
    if isinstance(found, Missing):
        return {"built": None, "reason": found.reason}
    return {"built": str(found), "reason": None}


def _allocation(found: Examined) -> JSON:
    test = found.allocation
    made = isinstance(test, Trial)
    fields: Mapping[str, JSON] = dict.fromkeys(
        ("asked_bytes", "tested_bytes", "gpu_bytes", "beyond_gpu_memory", "limited", "blocks", "verified", "problem")
    )
    if isinstance(test, Trial):
        fields = {
            "asked_bytes": test.plan.asked_bytes,
            "tested_bytes": test.plan.nbytes,
            "gpu_bytes": test.gpu_bytes,
            "beyond_gpu_memory": test.beyond,
            "limited": test.plan.limited or None,
            "blocks": test.plan.blocks,
            "verified": test.verified,
            "problem": test.problem,
        }
    return {
        "made": made,
        "not_made": None if isinstance(test, Trial) else test.reason,
        "passed": test.passed if isinstance(test, Trial) else None,
        "figures": found.situation.behind.figures if made else None,
        **fields,
        "wrong": list(test.wrong) if isinstance(test, Trial) else [],
        "notes": list(test.notes) if isinstance(test, Trial) else [],
        "rates": [_rate(rate) for rate in test.rates] if isinstance(test, Trial) else [],
    }


def _rate(rate: Rate) -> JSON:
    table = rate.expected
    return {
        "name": rate.name,
        "bytes": rate.nbytes,
        "seconds": rate.seconds,
        "bytes_s": rate.bytes_s,
        "table_bytes_s": None if table is None else table.value,
        "table_source": None if table is None else table.source,
        "table_how": None if table is None else table.how,
        "ratio": rate.ratio,
    }


def text_of(report: Mapping[str, JSON]) -> bytes:
    """What `--json` prints: the same bytes that the file holds."""
    return json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace")


def place_for(path: Path, overwrite: bool) -> Path:
    """The file to write, found good before anything is tested; a link is followed, so that it stays one."""
    target = Path(os.path.realpath(path))
    if path == Path("-") or (path.exists() and not path.is_file()):
        raise SuperTunerError(
            f"--report {path}: is not a file; name one, or use --json to have the report on standard output"
        )
    if not target.parent.is_dir():
        raise SuperTunerError(f"--report {path}: {target.parent} is not a folder; make it first, or name another file")
    if target.exists() and not overwrite and not is_ours(target):
        raise SuperTunerError(
            f"{path} exists and is no report of `supertuner doctor`; name another with --report, or give --overwrite"
        )
    if not os.access(target.parent, os.W_OK):
        raise SuperTunerError(
            f"--report {path}: cannot be written there; name a file in a folder of yours with --report"
        )
    return target


def is_ours(path: Path) -> bool:
    """Whether a file carries our mark. One that cannot be read, or is no JSON, does not."""
    try:
        if path.stat().st_size > LARGEST:
            return False
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("report") == OURS


def write(path: Path, report: Mapping[str, JSON]) -> None:
    durable.write_bytes(path, text_of(report) + b"\n")
