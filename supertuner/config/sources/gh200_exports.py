"""The variables that a GH200 job exports, their values, and who reads them: one table, and nothing of it is set here.

`supertuner env` prints it and `scripts/setup_gh200_env.sh` holds the same values, which a test compares. Nothing in it
would be refused by a stock torch: the seeds' `PYTORCH_CUDA_ALLOC_CONF=use_uvm:…` is an error to a CUDA build of it, so
the ratio and the access pattern travel in variables of their own.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from supertuner.config.sources.environment import SETTING_BY_VARIABLE


@dataclass(frozen=True, slots=True)
class ExportedVariable:
    """One variable of a GH200 job."""

    name: str
    value: str
    """What it is where nobody has set it; a plain word, safe in any shell."""
    readers: str
    """Who reads it, beside the setting it gives."""

    @property
    def setting(self) -> str:
        """The setting that it gives, unless a configuration says otherwise."""
        return SETTING_BY_VARIABLE[self.name]


GH200_EXPORTS: Final = (
    ExportedVariable("SIMPLETUNER_GH200_ENABLE_UVM_HINTS", "1", "residency hints (memory/hints/api.py)"),
    ExportedVariable(
        "GH200_UVM_OVERSUBSCRIPTION_RATIO", "5.0", "the overflow allocator's hard limit (memory/overflow/plugin.py)"
    ),
    ExportedVariable(
        "GH200_UVM_ACCESS_PATTERN", "gpu_first", "where the overflow allocator's managed memory prefers to be"
    ),
    ExportedVariable(
        "ACCELERATE_MIXED_PRECISION", "bf16", "the trainer; and Accelerate itself, in programs that use it"
    ),
)


def effective_values(environ: Mapping[str, str]) -> dict[str, str]:
    """The value of each variable after sourcing: what was set before wins, an empty value included."""
    return {export.name: environ.get(export.name, export.value) for export in GH200_EXPORTS}


def export_lines(environ: Mapping[str, str]) -> list[str]:
    """The exports as lines for `eval` in a POSIX shell.

    A variable that this process does not see may still be set in the shell and not exported: the shell looks itself.
    """
    return [_export_line(export, environ.get(export.name)) for export in GH200_EXPORTS]


def _export_line(export: ExportedVariable, value: str | None) -> str:
    if value is None:
        return f'export {export.name}="${{{export.name}-{export.value}}}"'
    return f"export {export.name}={shlex.quote(value)}"
