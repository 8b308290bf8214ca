"""Examines the installed torch in a child process, so that a torch that fails to import or hangs is only a finding.

The parser of allocator settings distinguishes a patched torch from a stock one: the child passes it `use_uvm:True`,
which a stock CUDA build rejects and a patched one accepts. This initialises nothing, creates no context, and its effect
ends with the child. A CPU build accepts any text, and so would a parser without checks; therefore an invented key is
tried first, and if that is accepted the answer is "unknown". The same parser shows which keys of the environment's
allocator variables torch does not know; a run would fail at the first of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from supertuner.config.sources import alloc_conf

TIMEOUT_S: Final = 120.0
ALLOCATOR_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Removed from the child's environment: a key that torch rejects would end the child before it can answer."""

PROBE_SCRIPT: Final = """
import json, sys
try:
    import torch
except Exception as error:  # any failure to import is the result
    print(json.dumps({"problem": f"{type(error).__name__}: {error}"}))
    sys.exit()

def refusal(settings):
    try:
        reader = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (reader or torch.cuda.memory._set_allocator_settings)(settings)
    except (ValueError, RuntimeError) as error:
        return str(error) or "refused"
    return ""

def accepts(settings):
    return not refusal(settings)

result = {"version": str(torch.__version__), "cuda": torch.version.cuda, "hip": torch.version.hip}
result["file"] = torch.__file__
if result["cuda"] is not None:
    result["sees"] = torch.cuda.device_count()
    result["patched"] = None if accepts("supertuner_no_such_key:True") else accepts("use_uvm:True")
    # Other rejections may depend on the state of this process; a backend, for example, is already chosen.
    result["refuses"] = [key for key, written in json.loads(sys.argv[1]) if "Unrecognized key" in refusal(written)]
print(json.dumps(result))
"""


@dataclass(frozen=True, slots=True)
class TorchProbeResult:
    """The child's answer. None means unknown, or meaningless in this build."""

    version: str | None = None
    cuda: str | None = None
    """The CUDA version that it was built for; None for a build without CUDA."""
    hip: str | None = None
    sees: int | None = None
    """Number of GPUs that it sees; None for a build without CUDA."""
    patched: bool | None = None
    """Whether its allocator accepts `use_uvm`, the setting of the patched torch of the GH200 forks."""
    refuses: tuple[str, ...] = ()
    """Keys in its allocator variables that it does not know; the keys of the GH200 forks are not tested here."""
    file: str | None = None
    problem: str | None = None
    """Why torch could not be examined."""


def probe_torch(
    environ: Mapping[str, str], python: str = sys.executable, timeout_s: float = TIMEOUT_S
) -> TorchProbeResult:
    """Examine the torch that `python` imports in this environment."""
    foreign_entries = [
        entry
        for name in ALLOCATOR_VARIABLES
        for entry in alloc_conf.parse_entries(environ.get(name, ""))
        if not entry.is_uvm_key
    ]
    keys_argument = json.dumps([(entry.key, entry.source_text) for entry in foreign_entries])
    child_environ = {name: value for name, value in environ.items() if name not in ALLOCATOR_VARIABLES}
    try:
        completed = subprocess.run(
            [python, "-W", "ignore", "-c", PROBE_SCRIPT, keys_argument],
            env=child_environ,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TorchProbeResult(problem=f"importing it took more than {timeout_s:.0f} s")
    return parse_answer(completed.stdout, completed.stderr, completed.returncode)


def parse_answer(out: str, err: str, code: int) -> TorchProbeResult:
    """Parse the last line of the child's output; a child that ended without one becomes a result with a problem."""
    lines = out.strip().splitlines()
    try:
        answered = json.loads(lines[-1]) if lines else None
    except ValueError:
        answered = None
    if not isinstance(answered, dict):
        last = err.strip().splitlines()[-1:] or ["no output"]
        return TorchProbeResult(problem=f"importing it ended with code {code}: {last[0]}")
    known = {name: answered[name] for name in TorchProbeResult.__slots__ if name in answered}
    return TorchProbeResult(**{**known, "refuses": tuple(answered.get("refuses", ()))})
