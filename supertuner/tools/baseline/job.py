"""The measured process: trains a configuration as `supertuner train` does, with a recorder attached as a sink.

    python -m supertuner.tools.baseline.job REQUEST

REQUEST is the file of a `record.MeasurementRequest`; the results go into the folder that it names. The console output
of training goes to standard error.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import supertuner
from supertuner.core.durable import write_bytes
from supertuner.core.errors import SuperTunerError
from supertuner.core.types import KIB
from supertuner.tools.baseline.record import MeasuredJob, MeasurementRequest, content_digest, read_request, write_job
from supertuner.tools.baseline.recorder import MeasurementRecorder

if TYPE_CHECKING:
    from torch.profiler import profile

RECORDED_PACKAGES = ("torch", "diffusers", "transformers", "peft", "lycoris-lora", "torchao", "numpy", "safetensors")
"""Packages whose versions affect a step's time and result."""
PROFILER_SCHEDULE: Final = {"wait": 3, "warmup": 2, "active": 5, "repeat": 1}
"""torch.profiler.schedule: steps to wait, to warm up, and to record, once."""
EVENTS_FILE: Final = "events.jsonl"


def main(arguments: Sequence[str]) -> int:
    request = read_request(Path(arguments[0]))
    try:
        run_measured_training(request)
    except SuperTunerError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def run_measured_training(request: MeasurementRequest) -> None:
    from supertuner.api.session import load_command_config, open_session
    from supertuner.api.training import train_in_session

    out = Path(request.out)
    with ExitStack() as stack:
        recorder = MeasurementRecorder(request.begun, request.turn_steps, stop_after=request.stop_after)
        if request.trace:
            recorder.after_step = stack.enter_context(open_profiler(Path(request.trace))).step
        sets = [*request.sets, "exports.push_to_hub=null"]  # a measurement is not a result
        with open_session(load_command_config(Path(request.config), sets)) as run_session:
            result = train_in_session(run_session, extra_sink=recorder)
    run_dir = result.run_dir
    write_bytes(out / EVENTS_FILE, (run_dir / EVENTS_FILE).read_bytes())
    write_job(
        out,
        MeasuredJob(
            steps=tuple(recorder.steps),
            start=recorder.startup_times(),
            peaks=recorder.peaks.bytes_by_kind | peak_resident_memory(),
            hints=result.hint_counts,
            memory=result.memory_lines,
            losses=content_digest((run_dir / "losses.jsonl").read_bytes()),
            versions=package_versions(),
            code=str(Path(supertuner.__file__).parent),
            seconds=time.monotonic() - request.begun,
        ),
    )


def open_profiler(trace: Path) -> profile:
    """torch.profiler over PROFILER_SCHEDULE; it writes the file `trace` after the last recorded step."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    def export(finished: profile) -> None:
        finished.export_chrome_trace(str(trace))

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    return profile(activities=activities, schedule=schedule(**PROFILER_SCHEDULE), on_trace_ready=export)


def peak_resident_memory(status: Path = Path("/proc/self/status")) -> dict[str, int]:
    """The kernel's peak resident size of this process (VmHWM); empty if /proc does not report it."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return {}  # no /proc: absent, not zero
    peak_kib = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return {} if peak_kib is None else {"process.resident": int(peak_kib) * KIB}


def package_versions() -> dict[str, str]:
    installed = {"supertuner": supertuner.__version__, "python": platform.python_version()}
    for package in RECORDED_PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # not installed, so it cannot have affected the run
    return installed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
