"""What torch is here, asked of a child process: a torch that cannot be imported, or that hangs, costs one line.

A patched torch is told from a stock one by its parser: the child hands the text `use_uvm:True` to torch's own reader of
allocator settings. A stock CUDA build refuses the key, a patched one takes it. Nothing is initialised by that, no
context is made, and what the child has set ends with it. A CPU build takes any text, and so may a reader that checks
nothing: a key that nobody can know is tried first, and where that one passes the answer is "unknown". The same reader
tells which keys of this environment's allocator variables torch does not know: a run would end with the first of them.
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
"""Kept from the child: a key in them that torch refuses would end it before it can answer."""

PROBE_SCRIPT: Final = """
import json, sys
try:
    import torch
except Exception as error:  # whatever it is, it is the answer
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

found = {"version": str(torch.__version__), "cuda": torch.version.cuda, "hip": torch.version.hip}
found["file"] = torch.__file__
if found["cuda"] is not None:
    found["sees"] = torch.cuda.device_count()
    found["patched"] = None if accepts("supertuner_no_such_key:True") else accepts("use_uvm:True")
    # Other refusals may be due to the moment: a backend, say, is chosen before the first line of this.
    found["refuses"] = [key for key, written in json.loads(sys.argv[1]) if "Unrecognized key" in refusal(written)]
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class TorchProbeResult:
    """What the child said. None: not known, or of no meaning in this build."""

    version: str | None = None
    cuda: str | None = None
    """The CUDA that it was built for; None is a build without CUDA."""
    hip: str | None = None
    sees: int | None = None
    """GPUs that it finds; None in a build without CUDA."""
    patched: bool | None = None
    """Whether its allocator knows the seeds' `use_uvm`."""
    refuses: tuple[str, ...] = ()
    """Keys in its allocator variables that it does not know; the seeds' are not asked about here."""
    file: str | None = None
    problem: str | None = None
    """Why nothing of this is known."""


def probe_torch(
    environ: Mapping[str, str], python: str = sys.executable, timeout_s: float = TIMEOUT_S
) -> TorchProbeResult:
    """Ask the torch that `python` would import in this environment."""
    foreign_entries = [
        one
        for name in ALLOCATOR_VARIABLES
        for one in alloc_conf.parse_entries(environ.get(name, ""))
        if not one.is_uvm_key
    ]
    keys_argument = json.dumps([(one.key, one.source_text) for one in foreign_entries])
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
    """The child's last line; a child that died without one is itself the finding."""
    lines = out.strip().splitlines()
    try:
        answered = json.loads(lines[-1]) if lines else None
    except ValueError:
        answered = None
    if not isinstance(answered, dict):
        last = err.strip().splitlines()[-1:] or ["it said nothing"]
        return TorchProbeResult(problem=f"importing it ended with code {code}: {last[0]}")
    known = {name: answered[name] for name in TorchProbeResult.__slots__ if name in answered}
    return TorchProbeResult(**{**known, "refuses": tuple(answered.get("refuses", ()))})
