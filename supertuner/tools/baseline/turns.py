"""Processes that are measured, started by us and ended with us: one alone, or two that take turns of some steps.

A process that waits for its turn is stopped as a whole, so the other one has the machine to itself. Whatever happens
here, nobody is left behind: leaving `Running` kills what is still there.
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
from types import TracebackType
from typing import Final

from supertuner.core.errors import BaselineError
from supertuner.core.types import KIB
from supertuner.tools.baseline.record import JOB, Job, Order, Peaks, read_job, write_order

LOG: Final = "job.log"
SAID_LINES: Final = 12
WATCH_S: Final = 0.1
KINDS: Final[Mapping[str, str]] = {
    "RssAnon": "process.anonymous",
    "RssShmem": "process.shared",
    "RssFile": "process.files",
}
"""Fields of a process's status, and the kind of memory that each is: its own, arenas and caches, and mapped files."""


@dataclass(frozen=True, slots=True)
class Command:
    """How a measured process is started: it is given the file of an order as its last argument."""

    title: str
    words: tuple[str, ...]
    environ: Mapping[str, str]
    code: Path | None = None
    """Where the package must be that runs; None: wherever it is found."""


class Running:
    """One measured process."""

    def __init__(self, command: Command, order: Order) -> None:
        self.title = command.title
        self.folder = Path(order.out)
        self.folder.mkdir(parents=True)
        self._peaks = Peaks()
        self._watching = threading.Event()
        file = self.folder / "order.json"
        write_order(file, replace(order, begun=time.monotonic()))
        with (self.folder / LOG).open("wb") as log:
            self._process = subprocess.Popen(
                [*command.words, str(file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(command.environ),
                process_group=0,  # Ctrl-C is for us: we end it, and it need not save
            )
        self._watch = threading.Thread(target=self._look, name=f"memory of {command.title}", daemon=True)
        self._watch.start()

    def until_turn_ends(self) -> bool:
        """Wait until it stops for somebody else's turn; False: it has ended instead, and left what it measured."""
        found = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert found is not None
        if found.si_code == os.CLD_STOPPED:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG)
            return True
        code = self._process.wait()
        if code != 0:
            raise BaselineError(f"{self.title} ended with exit code {code}; it said:\n{self._said()}")
        return False

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def job(self) -> Job:
        """What it left. What only an onlooker sees of its memory is added."""
        if not (self.folder / JOB).is_file():
            raise BaselineError(
                f"{self.title} ended without an error and left no {JOB} in the folder that its order names (`out`); "
                "a peer leaves what benchmarks/quickstart_peer.py does (docs/baselines.md)"
            )
        found = read_job(self.folder)
        return replace(found, peaks={**self._peaks.found, **found.peaks})

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching.set()
        self._watch.join()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _look(self) -> None:
        while not self._watching.wait(WATCH_S):
            kinds = memory_of(Path(f"/proc/{self._process.pid}/status"))
            if kinds:
                self._peaks.see(kinds)

    def _said(self) -> str:
        lines = (self.folder / LOG).read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-SAID_LINES:]) or "  nothing"


def run_alone(command: Command, order: Order) -> Job:
    with Running(command, replace(order, turn_steps=0)) as running:
        assert not running.until_turn_ends(), "nobody told it to take turns"
        return running.job()


def run_in_turns(commands: Sequence[Command], orders: Sequence[Order], turn_steps: int) -> list[Job]:
    """Both, step range by step range, in an order that turns: first, second, second, first, …

    Each starts alone: the other has not begun yet, or is stopped.
    """
    first, second = (replace(order, turn_steps=turn_steps) for order in orders)
    with Running(commands[0], first) as one:
        _require_turn(one)
        with Running(commands[1], second) as other:
            _require_turn(other)
            turn, going = 0, [one, other]
            while going:
                for running in list(going) if turn % 2 == 0 else list(reversed(going)):
                    running.go_on()
                    if not running.until_turn_ends():
                        going.remove(running)
                turn += 1
            return [one.job(), other.job()]


def memory_of(status: Path) -> dict[str, int]:
    """Bytes by kind that a process has in RAM now; none where it has ended, or the kernel does not say."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return {}  # it has just ended
    fields = (line.partition(":") for line in lines)
    return {KINDS[name]: int(value.split()[0]) * KIB for name, _, value in fields if name in KINDS}


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM leaves as Ctrl-C does: through everything that must be put away."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def scratch() -> tempfile.TemporaryDirectory[str]:
    """For orders and what measured processes leave, until it is read."""
    return tempfile.TemporaryDirectory(prefix="supertuner-baseline-")


def _require_turn(running: Running) -> None:
    if not running.until_turn_ends():
        raise BaselineError(f"{running.title} ended before it trained; it had nothing to do")
