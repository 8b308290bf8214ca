"""Starts measured processes: one alone, or two that take turns of a few steps.

A process that waits for its turn is stopped as a whole, so the other one has the machine to itself. No process outlives
this one: leaving the context of a `MeasuredProcess` kills it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from supertuner.core.errors import BaselineError
from supertuner.core.events import Progress
from supertuner.core.interrupts import raise_interrupt
from supertuner.core.types import KIB
from supertuner.tools.baseline import record
from supertuner.tools.baseline.record import JOB_FILE, MeasuredJob, MeasurementRequest

LOG_FILE: Final = "job.log"
LOG_TAIL_LINES: Final = 12
MEMORY_POLL_S: Final = 0.1
MEMORY_KIND_BY_STATUS_FIELD: Final[Mapping[str, str]] = {
    "RssAnon": "process.anonymous",
    "RssShmem": "process.shared",
    "RssFile": "process.files",
}
"""Field of /proc/PID/status → kind of memory: private memory, shared memory (arenas and caches), mapped files."""


@dataclass(frozen=True, slots=True)
class MeasurementContext:
    """What all measurements of a command share."""

    environ: Mapping[str, str]
    """The environment of the measured processes."""
    progress: Progress


@dataclass(frozen=True, slots=True)
class JobCommand:
    """How a measured process is started; the path of the request file is appended to `arguments`."""

    title: str
    arguments: tuple[str, ...]
    environ: Mapping[str, str]
    code_path: Path | None = None
    """The folder from which `supertuner` must be imported; None: any."""


class MeasuredProcess:
    """One measured process, started on construction and killed on leaving its context."""

    def __init__(self, command: JobCommand, request: MeasurementRequest) -> None:
        self.title = command.title
        self.folder = Path(request.out)
        self.folder.mkdir(parents=True)
        self._peaks = record.PeakMemory()
        self._stop_watching = threading.Event()
        file = self.folder / "order.json"
        record.write_request(file, replace(request, begun=time.monotonic()))
        with (self.folder / LOG_FILE).open("wb") as log:
            self._process = subprocess.Popen(
                [*command.arguments, str(file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(command.environ),
                process_group=0,  # Ctrl-C reaches only us; we kill the child, which need not save
            )
        self._watch_thread = threading.Thread(target=self._watch_memory, name=f"memory of {command.title}", daemon=True)
        self._watch_thread.start()

    def wait_for_turn_end(self) -> bool:
        """Wait until the process stops at the end of its turn (True) or ends after its last step (False).

        Raises BaselineError with the end of its log if it fails.
        """
        state = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert state is not None
        if state.si_code == os.CLD_STOPPED:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG)
            return True
        code = self._process.wait()
        if code != 0:
            raise BaselineError(f"{self.title} ended with exit code {code}; its last output:\n{self._log_tail()}")
        return False

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def read_result(self) -> MeasuredJob:
        """The job that the process recorded, with the memory peaks added that this process measured from outside."""
        if not (self.folder / JOB_FILE).is_file():
            raise BaselineError(
                f"{self.title} ended without an error but wrote no {JOB_FILE} into the folder `out` of its request; "
                "a peer must write the files that benchmarks/quickstart_peer.py writes (docs/baselines.md)"
            )
        job = record.read_job(self.folder)
        return replace(job, peaks={**self._peaks.bytes_by_kind, **job.peaks})

    def __enter__(self) -> MeasuredProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop_watching.set()
        self._watch_thread.join()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _watch_memory(self) -> None:
        while not self._stop_watching.wait(MEMORY_POLL_S):
            self._peaks.update(read_process_memory(Path(f"/proc/{self._process.pid}/status")))

    def _log_tail(self) -> str:
        lines = (self.folder / LOG_FILE).read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-LOG_TAIL_LINES:]) or "  nothing"


def run_job(command: JobCommand, request: MeasurementRequest) -> MeasuredJob:
    with MeasuredProcess(command, replace(request, turn_steps=0)) as process:
        assert not process.wait_for_turn_end(), "its request has turn_steps=0"
        return process.read_result()


def run_jobs_in_turns(
    commands: Sequence[JobCommand], requests: Sequence[MeasurementRequest], turn_steps: int
) -> list[MeasuredJob]:
    """Run two jobs in turns of `turn_steps` steps, in the order first, second, second, first, …

    Each starts alone: meanwhile the other has not been started yet, or is stopped.
    """
    first, second = (replace(request, turn_steps=turn_steps) for request in requests)
    with MeasuredProcess(commands[0], first) as first_process:
        _require_first_turn(first_process)
        with MeasuredProcess(commands[1], second) as second_process:
            _require_first_turn(second_process)
            turn, unfinished = 0, [first_process, second_process]
            while unfinished:
                for process in list(unfinished) if turn % 2 == 0 else list(reversed(unfinished)):
                    process.resume()
                    if not process.wait_for_turn_end():
                        unfinished.remove(process)
                turn += 1
            return [first_process.read_result(), second_process.read_result()]


def read_process_memory(status: Path) -> dict[str, int]:
    """Resident bytes by kind, from a process's /proc status file; empty if the process has ended."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return {}  # the process has just ended
    fields = (line.partition(":") for line in lines)
    return {
        MEMORY_KIND_BY_STATUS_FIELD[name]: int(value.split()[0]) * KIB
        for name, _, value in fields
        if name in MEMORY_KIND_BY_STATUS_FIELD
    }


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit, so that it runs all clean-up code as Ctrl-C does."""

    def leave(number: int, frame: object) -> None:
        raise_interrupt(SystemExit(128 + number))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder for requests and results of measured processes; SIGTERM removes it too."""
    with exit_on_sigterm(), tempfile.TemporaryDirectory(prefix="supertuner-baseline-") as folder:
        yield Path(folder)


def _require_first_turn(process: MeasuredProcess) -> None:
    if not process.wait_for_turn_end():
        raise BaselineError(f"{process.title} ended before its first step: it had nothing to train")
