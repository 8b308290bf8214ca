"""The process that is measured: the training of a configuration as `supertuner train` does it, with a recorder beside.

    python -m supertuner.tools.baseline.job ORDER

ORDER is a file (`record.Order`); what was measured is left in the folder that it names. Standard error has what a
training run says.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import supertuner
from supertuner.core.durable import write_bytes
from supertuner.core.errors import SuperTunerError
from supertuner.core.types import KIB
from supertuner.tools.baseline.record import Job, Order, read_order, write_job
from supertuner.tools.baseline.recorder import Recorder

if TYPE_CHECKING:
    from torch.profiler import profile

PACKAGES: Final = ("torch", "diffusers", "transformers", "peft", "lycoris-lora", "torchao", "numpy", "safetensors")
"""Whose versions decide what a step takes and gives."""
TRACED: Final = (3, 2, 5)
"""Of the profiler: steps that are left out, that warm it up, and that are in the trace."""
EVENTS: Final = "events.jsonl"


def main(arguments: Sequence[str]) -> int:
    order = read_order(Path(arguments[0]))
    try:
        run(order)
    except SuperTunerError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def run(order: Order) -> None:
    from supertuner.tools.session import load_narrowed, session
    from supertuner.tools.training import train_in

    out = Path(order.out)
    with ExitStack() as opened:
        profiled = opened.enter_context(profiler(Path(order.trace))) if order.trace else None
        after: Callable[[], None] = (lambda: None) if profiled is None else profiled.step
        recorder = Recorder(order.begun, order.turn_steps, stop_after=order.stop_after, after_step=after)
        with session(load_narrowed(Path(order.config), order.sets)) as work:
            trained = train_in(work, also=recorder)
            path = work.path
    write_bytes(out / EVENTS, (path / EVENTS).read_bytes())
    write_job(
        out,
        Job(
            steps=tuple(recorder.steps),
            start=recorder.start(),
            peaks=recorder.peaks.found | own_peak(),
            hints=trained.hints,
            memory=trained.memory,
            losses=digest((path / "losses.jsonl").read_bytes()),
            versions=versions(),
            code=str(Path(supertuner.__file__).parent),
            seconds=time.monotonic() - order.begun,
        ),
    )


def profiler(trace: Path) -> profile:
    """Torch's profiler over a few steps; it writes `trace` when it has them."""
    from torch.profiler import ProfilerActivity, profile, schedule

    wait, warmup, active = TRACED

    def keep(done: profile) -> None:
        done.export_chrome_trace(str(trace))

    import torch

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    steps = schedule(wait=wait, warmup=warmup, active=active, repeat=1)
    return profile(activities=activities, schedule=steps, on_trace_ready=keep)


def digest(content: bytes) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(content)


def own_peak(status: Path = Path("/proc/self/status")) -> dict[str, int]:
    """The most memory of this process that was ever in RAM, by the kernel's own count; none where it does not say."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return {}  # no /proc: absent, not zero
    most = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return {} if most is None else {"process.resident": int(most) * KIB}


def versions() -> dict[str, str]:
    found = {"supertuner": supertuner.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # not here, and so it took part in nothing
    return found


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
