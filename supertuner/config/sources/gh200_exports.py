"""The environment variables of a GH200 job: names, default values and readers. This module sets none of them.

`supertuner env` prints the table, and `scripts/setup_gh200_env.sh` holds the same values (a test compares them). Stock
torch accepts them all: the GH200 forks' `PYTORCH_CUDA_ALLOC_CONF=use_uvm:…` is an error in a CUDA build of stock torch,
so the ratio and the access pattern have their own variables.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from supertuner.config.sources.environment import SETTING_BY_VARIABLE
from supertuner.core.types import JSON


@dataclass(frozen=True, slots=True)
class ExportedVariable:
    """One variable of a GH200 job."""

    name: str
    value: str
    """Its value if it is not set; a plain word, safe in any shell."""
    readers: str
    """The code that reads it, beside the setting that it sets."""

    @property
    def setting(self) -> str:
        """The setting that it sets, unless a configuration file sets it."""
        return SETTING_BY_VARIABLE[self.name]


GH200_EXPORTS: Final = (
    ExportedVariable("SIMPLETUNER_GH200_ENABLE_UVM_HINTS", "1", "residency hints (memory/hints/api.py)"),
    ExportedVariable(
        "GH200_UVM_OVERSUBSCRIPTION_RATIO",
        "5.0",
        "the overflow allocator's hard limit (memory/overflow_allocator/plugin.py)",
    ),
    ExportedVariable(
        "GH200_UVM_ACCESS_PATTERN", "gpu_first", "preferred location of the overflow allocator's managed memory"
    ),
    ExportedVariable("ACCELERATE_MIXED_PRECISION", "bf16", "the trainer; also Accelerate, in programs that use it"),
)


def export_table(environ: Mapping[str, str]) -> dict[str, dict[str, JSON]]:
    """Each variable: its value after sourcing, its default, whether it is set, its setting and its readers.

    A variable that is set keeps its value, even an empty one.
    """
    return {
        export.name: {
            "value": environ.get(export.name, export.value),
            "default": export.value,
            "set": export.name in environ,
            "setting": export.setting,
            "readers": export.readers,
        }
        for export in GH200_EXPORTS
    }


def export_lines(environ: Mapping[str, str]) -> list[str]:
    """The exports as lines for `eval` in a POSIX shell.

    A variable that this process does not see may still be set in the shell without being exported. Each line therefore
    lets the shell keep a value that is already set.
    """
    return [_export_line(export, environ.get(export.name)) for export in GH200_EXPORTS]


def _export_line(export: ExportedVariable, value: str | None) -> str:
    if value is None:
        return f'export {export.name}="${{{export.name}-{export.value}}}"'
    return f"export {export.name}={shlex.quote(value)}"
